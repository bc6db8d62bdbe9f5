"""The daemons of paramserver: a coordinator and shards."""

import os

import pswire  # noqa: F401 - sets gRPC's log level, before gRPC reads it

# TLS 1.3 alone: gRPC for Python can't set the least version (grpc/grpc#37305), which is
# 1.2. Versions before 1.3 must agree on a cipher suite of this list, and one with a
# pre-shared key, of which there is none, is never agreed on; those of TLS 1.3 are not
# listed. Here and not in pswire: a script's other connections are its own matter.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-PSK-AES128-CBC-SHA")
