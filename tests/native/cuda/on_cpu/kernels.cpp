// native/cuda/kernels.cu by an ordinary C++ compiler. The code of the device and of the host is compiled as one.
#include "cuda_runtime.h"

#define __CUDACC__
#define __CUDA_ARCH__ 900

#include "../../../../native/cuda/kernels.cu"
