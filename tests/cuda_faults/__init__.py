"""The CUDA kernels with a fault, run on the CPU: the tests must find each of them.

`make planted-cuda-faults` plants all of `faults.py` and prints which test finds them
(`WORDS="norm barrier"` chooses by name). To plant another one, add it there.
"""
