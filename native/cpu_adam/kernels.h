// The single-threaded kernels behind the functions of cpu_adam.h, one namespace per instruction set.
#pragma once

#include "moments.h"
#include "noise.h"

namespace infinity::cpu_adam {

// The values that are written past the caches, to addresses that are multiples of 64 bytes.
enum class Streamed { nothing, param, all };

// A part of a chunk that lies in one piece in every block: `n` elements from these addresses, whole groups.
struct Run {
  const void* grad; Dtype grad_dtype;
  void* param; Dtype param_dtype;
  void* master; Master master_format;
  Moments first, second, slow;
  std::size_t n;
  std::uint32_t number;  // the lower half of the first element's number; it does not pass 2^32 within the run
  Noise noise;
  Streamed streamed;
};

// The internal rules: sgd without momentum is one of its own.
constexpr int kRules = 6, kFormats = 3;

// Reads `run` and writes what becomes of it to where `to` lies, of which nothing else counts; `run` itself is in place.
using UpdateKernel = void(const Run& run, const Run& to, const Constants& c);
// The sums of the norm blocks of n values, of which the last one may be a part.
using NormKernel = void(const void* values, Dtype dtype, std::size_t n, double* sums);
// How many blocks take turns: an addition to a lane has to wait for the one before, which takes three or four cycles.
constexpr std::size_t kNormBlocksAtOnce = 4;
// Whole groups to and from fp32.
using DecodeKernel = void(const Moments& from, float* to, std::size_t n);
using EncodeKernel = void(const Moments& to, const float* from, std::size_t n);
// Adds whole groups.
using AddKernel = void(void* target, const void* source, std::size_t n);
using InPlaceKernel = void(float* a, const float* b, float* c, std::size_t n);
// `streamed`: both targets lie at whole cache lines.
using ShadowKernel = void(const float* a, const float* b, const float* c, float* to_a, float* to_c, std::size_t n, bool streamed);

struct Kernels {
  UpdateKernel* update[kRules][kFormats];  // by rule (Rule, then sgd with momentum) and Format
  DecodeKernel* decode[kFormats][2];       // by Format and Moment
  EncodeKernel* encode[kFormats][2];
  NormKernel* norm_blocks;
  AddKernel* add[3];  // by Dtype
  InPlaceKernel* in_place;
  ShadowKernel* shadow;
};

NormKernel scalar_norm_blocks, avx2_norm_blocks;
extern const Kernels scalar_kernels, avx2_kernels, avx512_kernels, neon_kernels;

}  // namespace infinity::cpu_adam
