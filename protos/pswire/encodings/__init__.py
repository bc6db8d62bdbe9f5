"""How elements are turned into fewer bytes: a file for each way, one interface.

Pure but for numpy and torch, which the command line does not import. Whatever decodes
takes hostile bytes: it raises `Refusal` and nothing else, before it allocates.
"""
