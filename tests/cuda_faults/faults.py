"""Changes of a line or two of native/cuda, each of which breaks something."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    breaks: str
    file: str  # of native/cuda
    old: str
    new: str


FAULTS = [
    # The norm
    Fault(
        "norm: no barrier before the sums of a tile are added",
        "kernels.cu",
        "= next;\n    __syncthreads();",
        "= next;",
    ),
    Fault(
        "norm: no barrier before the next tile",
        "kernels.cu",
        "    }\n    __syncthreads();\n  }\n  if (threadIdx.x == 0) *total",
        "    }\n  }\n  if (threadIdx.x == 0) *total",
    ),
    Fault(
        "norm: a barrier for one thread",
        "kernels.cu",
        "if (threadIdx.x == 0) {\n      const",
        "if (threadIdx.x == 0) {\n      __syncthreads();\n      const",
    ),
    Fault(
        "norm: the next tile is the second next",
        "kernels.cu",
        "at + kThreads + threadIdx.x;",
        "at + 2 * kThreads + threadIdx.x;",
    ),
    Fault(
        "norm: lanes are added in another order",
        "kernels.cu",
        "static_cast<int>(lane), kLanes)",
        "static_cast<int>(lane ^ 1), kLanes)",
    ),
    Fault(
        "norm: the lanes of the first norm block of a warp",
        "kernels.cu",
        "static_cast<int>(lane), kLanes)",
        "static_cast<int>(lane))",
    ),
    Fault(
        "norm: a mask of eight lanes",
        "kernels.cu",
        "__shfl_sync(0xffffffffu, sum",
        "__shfl_sync(0x000000ffu, sum",
    ),
    Fault(
        "norm: threads behind the end return before an exchange",
        "kernels.cu",
        "  double total = 0;\n",
        "  if (begin >= n) return;\n  double total = 0;\n",
    ),
    Fault("norm: sums of blocks behind the end", "kernels.cu", "== 0 && begin < n)", "== 0)"),
    Fault(
        "norm: the last sum of a tile is left out",
        "kernels.cu",
        "(count - at) : kThreads;",
        "(count - at) : kThreads - 1;",
    ),
    Fault(
        "norm: sums are read behind their end",
        "kernels.cu",
        "    if (ahead < count) next",
        "    next",
    ),
    Fault(
        "norm: a NaN keeps its sign",
        "kernels.cu",
        "sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll)",
        "sum",
    ),
    Fault(
        "norm: too few CUDA blocks",
        "kernels.cu",
        "(blocks * kLanes + kNormThreads - 1) / kNormThreads",
        "(blocks * kLanes + kNormThreads - 9) / kNormThreads",
    ),
    Fault(
        "norm: fp16 is read as bf16",
        "kernels.cu",
        "case Dtype::fp16: return f(static_cast<__half*>",
        "case Dtype::fp16: return f(static_cast<__nv_bfloat16*>",
    ),
    Fault(
        "norm: the second kernel in the default stream",
        "kernels.cu",
        "kThreads, stream, block_sums",
        "kThreads, 0, block_sums",
    ),
    Fault(
        "norm: the values ahead reach one behind the end",
        "norm.h",
        "* kLanes < end; i +=",
        "* kLanes <= end; i +=",
    ),
    Fault(
        "norm: squares are rounded to fp32",
        "norm.h",
        "    const double x = widen(values[i]);\n    sum = __fma_rn(x, x, sum);",
        "    const float x = widen(values[i]);\n    sum = sum + x * x;",
    ),
    Fault(
        "norm: the values ahead are added from the last to the first",
        "norm.h",
        "widen(ahead[k])",
        "widen(ahead[kAhead - 1 - k])",
    ),
    # Updates
    Fault(
        "update: in the default stream",
        "kernels.cu",
        "kThreads, stream, each.launch)",
        "kThreads, 0, each.launch)",
    ),
    Fault(
        "update: two octets share a stage",
        "kernels.cu",
        "stages[threadIdx.x / 8])",
        "stages[threadIdx.x / 16])",
    ),
    Fault(
        "update: room for half of the stages",
        "kernels.cu",
        "INFINITY_SHARED(Stage, stages, kThreads / 8)",
        "INFINITY_SHARED(Stage, stages, kThreads / 16)",
    ),
    Fault(
        "update: CUDA blocks are rounded down",
        "kernels.cu",
        "(groups + groups_per_block - 1) / groups_per_block",
        "groups / groups_per_block",
    ),
    Fault(
        "update: what a launch returns is lost",
        "kernels.cu",
        "check_cuda(launched(each.function, each.blocks, kThreads, stream, each.launch), what);",
        "launched(each.function, each.blocks, kThreads, stream, each.launch), void(what);",
    ),
    Fault(
        "update: an error is left set",
        "kernels.cu",
        "return;\n  cudaGetLastError();",
        "return;",
    ),
    Fault(
        "update: an error of others is its own",
        "kernels.cu",
        "addresses, 0, as_stream(stream));",
        "addresses, 0, as_stream(stream)), cudaGetLastError();",
    ),
    Fault(
        "update: each launch asks its own occupancy",
        "kernels.cu",
        "    all.push_back({kernel->function, grid(*kernel, launch.count), launch});\n",
        "    check_cuda(launched(kernel->function, grid(*kernel, launch.count), kThreads, stream, "
        "launch), kNoUpdate);\n",
    ),
    Fault(
        "update: a partial one is called none",
        "kernels.cu",
        "&each == all.data() ? kNoUpdate",
        "true ? kNoUpdate",
    ),
    # Errors, devices and captures
    Fault(
        "reason: CUDA's error is left set",
        "kernels.cu",
        "  cudaGetLastError();  // the answer is",
        "  // the answer is",
    ),
    Fault(
        "reason: the thread keeps the other device",
        "kernels.cu",
        "way_back = cudaSetDevice(before);",
        "way_back = cudaSuccess;",
    ),
    Fault(
        "reason: the way back is not said to have failed",
        "kernels.cu",
        "if (error == cudaSuccess && way_back == cudaSuccess) return",
        "if (error == cudaSuccess) return",
    ),
    Fault(
        "reason: the thread's own device is set again",
        "kernels.cu",
        "    if (device != before) error",
        "    error",
    ),
    Fault(
        "captures: the global mode",
        "kernels.cu",
        "mode = cudaStreamCaptureModeThreadLocal",
        "mode = cudaStreamCaptureModeGlobal",
    ),
    # The module
    Fault(
        "module: sums and total are exchanged",
        "module.cpp",
        'pointer<double>("block_sums", block_sums, 8, unless_empty(n)), '
        'pointer<double>("total", total, 8, unless_empty(n))',
        'pointer<double>("total", total, 8, unless_empty(n)), '
        'pointer<double>("block_sums", block_sums, 8, unless_empty(n))',
    ),
    Fault(
        "module: a null total is taken",
        "module.cpp",
        'pointer<double>("total", total, 8, unless_empty(n))',
        'pointer<double>("total", total, 8)',
    ),
    Fault(
        "module: any address is taken",
        "module.cpp",
        "address, alignment_of(type)",
        "address, 1",
    ),
    Fault(
        "module: the stream of an update is lost",
        "module.cpp",
        "begin, end, hyper, stream);",
        "begin, end, hyper, 0 * stream);",
    ),
    Fault(
        "module: the stream of a norm is lost",
        "module.cpp",
        "unless_empty(n)), stream);",
        "unless_empty(n)), 0 * stream);",
    ),
    Fault(
        "module: begin is lost",
        "module.cpp",
        "update(rule, chunk, begin, end, hyper, stream)",
        "update(rule, chunk, 0 * begin, end, hyper, stream)",
    ),
    # An octet
    Fault(
        "octet: an exchange is missing", "octet.h", "apart = 4; apart > 0", "apart = 2; apart > 0"
    ),
    Fault(
        "octet: exchanges with another octet",
        "octet.h",
        "apart = 4; apart > 0",
        "apart = 8; apart > 0",
    ),
    Fault(
        "octet: a scale may be written before it is read",
        "octet.h",
        "    __syncwarp();\n",
        "",
    ),
    Fault(
        "octet: the old scale stays where there was one",
        "octet.h",
        "if (threadIdx.x % 8 == 0) *to",
        "if (threadIdx.x % 8 == 0 && *to == 0) *to",
    ),
    Fault(
        "octet: every lane writes the scale",
        "octet.h",
        "if (threadIdx.x % 8 == 0) *to",
        "*to",
    ),
    Fault(
        "octet: noise without its half",
        "octet.h",
        "times * (0.5f - 0x1p23f)",
        "times * -0x1p23f",
    ),
    Fault(
        "octet: a quotient without its last correction",
        "octet.h",
        "return __fmaf_rn(__fmaf_rn(-quotient, y, x), inverse, quotient);",
        "return quotient;",
    ),
    # Launches
    Fault("launch: vectors at any address", "launch.h", "% (4 * width) == 0", "% width == 0"),
    Fault(
        "launch: one element behind the end",
        "launch.h",
        "at + 4 < launch.end ? at + 4 : launch.end",
        "at + 4 < launch.end ? at + 4 : launch.end + 1",
    ),
    Fault(
        "launch: the octets of a warp stop at different turns",
        "launch.h",
        "k / kTogether * kTogether < launch.count",
        "k < launch.count",
    ),
    Fault(
        "launch: the first group of the tail is left out",
        "launch.h",
        "launch.rest = head > 0 ? whole_end : whole_end + 1;",
        "launch.rest = whole_end + 1;",
    ),
    Fault(
        "launch: numbers begin again with each superblock",
        "launch.h",
        "  rest.position += at;\n",
        "",
    ),
    Fault(
        "launch: the caller's rounding mode counts",
        "launch.h",
        "  const DefaultFloatEnvironment environment;",
        "  //",
    ),
    Fault(
        "launch: an idle octet writes the scale of another one",
        "launch.h",
        "run.first.scales = run.second.scales = run.slow.scales = scale;",
        "",
    ),
]
