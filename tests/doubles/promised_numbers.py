"""How far numbers may be from those of one process: see G21 of docs/guarantees.md."""

from typing import Final

DEVIATION_MAX: Final = 1e-6
"""Of values in float32: the largest difference over the largest value of the tensor."""

FLOAT64_DEVIATION_MAX: Final = 1e-12
"""Of values in float64, likewise. A last bit is 1e-16 of a number; what is left is the
order in which numbers are added, in some dozens of steps. A wrong formula is far from
it, which in float32 one can't be sure of."""

NORM_DEVIATION_MAX: Final = 1e-5
"""Of the norm of a gradient, relative. It is taken at values that may differ by
`DEVIATION_MAX`, and follows them by a factor that depends on the training: below 3 in
those of the tests, where one process adds in another order."""
