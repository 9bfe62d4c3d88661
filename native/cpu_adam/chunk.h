// Where the elements of a chunk lie, and which chunks can be updated: for the kernels of the CPU and of CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "kernels.h"

#ifdef __CUDACC__
#define INFINITY_EVERYWHERE __host__ __device__
#else
#define INFINITY_EVERYWHERE
#endif

namespace infinity::cpu_adam {
namespace {

INFINITY_EVERYWHERE constexpr std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }
INFINITY_EVERYWHERE constexpr std::size_t bytes_of(Master format) { return format == Master::none ? 0 : format == Master::fp32 ? 4 : 2; }
INFINITY_EVERYWHERE constexpr std::size_t bytes_of(Format format) { return format == Format::fp32 ? 4 : format == Format::bf16 ? 2 : 1; }

// Null stays null. With `there` no pointer is null, and none is compared.
template <bool there = false, class T>
INFINITY_EVERYWHERE T* offset(T* from, std::size_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;
  return there || from ? static_cast<Byte*>(from) + bytes : nullptr;
}

// Where element `at` of a block of moments begins; for int8 its group's scale too. `Count` has room for the bytes before it.
template <bool there = false, class Count>
INFINITY_EVERYWHERE Moments locate(void* block, Format format, Count at) {
  if (format != Format::int8) return {offset<there>(block, at * static_cast<Count>(bytes_of(format))), nullptr};
  // The scales of the superblocks before it lie between the codes, and their codes between the scales.
  constexpr Count superblock = kSuperblock, scales = kSuperblockBytes - kSuperblock;
  const Count before = at / superblock;
  void* const scale = offset<there>(block, superblock + at / Count{kGroup} * Count{sizeof(float)} + before * superblock);
  return {offset<there>(block, at + before * scales), static_cast<float*>(scale)};
}

// The run of n elements from `at`, which must lie in one piece and share their noise.
template <bool there = false, class Count>
INFINITY_EVERYWHERE Run run_at(const Chunk& chunk, Count at, std::size_t n, const Noise& noise, Streamed streamed) {
  return {offset<there>(chunk.grad, at * static_cast<Count>(bytes_of(chunk.grad_dtype))), chunk.grad_dtype,
          offset<there>(chunk.param, at * static_cast<Count>(bytes_of(chunk.param_dtype))), chunk.param_dtype,
          offset<there>(chunk.master, at * static_cast<Count>(bytes_of(chunk.master_format))), chunk.master_format,
          locate<there>(chunk.first, chunk.moments, at), locate<there>(chunk.second, chunk.moments, at),
          locate<there>(chunk.slow, chunk.moments, at), n, static_cast<std::uint32_t>(chunk.position + at), noise, streamed};
}

// The most of n elements from `number` whose numbers have the same upper half, where noise is asked for.
inline std::size_t same_noise(Format format, std::uint64_t number, std::size_t n) {
  if (format == Format::fp32) return n;
  return static_cast<std::size_t>(std::min<std::uint64_t>(n, (std::uint64_t{1} << 32) - (number & 0xffffffff)));
}

// The row of a rule in a table of kernels: sgd with momentum is one of its own.
inline int row_of(Rule rule, const Hyper& hyper) { return static_cast<int>(rule) + (rule == Rule::sgd && hyper.momentum != 0); }

inline bool has_first(Rule rule, const Hyper& hyper) {
  return rule == Rule::adam || rule == Rule::lion || rule == Rule::ademamix || (rule == Rule::sgd && hyper.momentum != 0);
}
inline bool has_second(Rule rule) { return rule == Rule::adam || rule == Rule::adagrad || rule == Rule::ademamix; }
inline bool has_slow(Rule rule) { return rule == Rule::ademamix; }

// Throws std::invalid_argument when elements [begin, end) of the chunk cannot be updated.
inline void check(Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper) {
  const auto refuse = [](const char* why) { throw std::invalid_argument(why); };
  const bool first = has_first(rule, hyper), second = has_second(rule);
  if (begin > end) refuse("begin is behind end");
  if (chunk.master_format == Master::none && chunk.param_dtype != Dtype::fp32) refuse("master format 'none' needs an fp32 param");
  if (chunk.master_format == Master::fp32 && chunk.param_dtype == Dtype::fp32) refuse("an fp32 param is its own master: format 'none'");
  if (chunk.master_format == Master::split && chunk.param_dtype != Dtype::bf16) refuse("master format 'split' needs a bf16 param");
  if ((first || second) && chunk.moments != Format::fp32 && (begin % kGroup != 0 || chunk.position % kGroup != 0)) {
    refuse("begin and position must be multiples of 32 with bf16 and int8 moments");
  }
  if (begin == end) return;
  if (!chunk.param) refuse("param must not be null");
  if (!chunk.master && chunk.master_format != Master::none) refuse("master must not be null");
  if (first && !chunk.first) refuse("first must not be null for this rule");
  if (second && !chunk.second) refuse("second must not be null for this rule");
  if (has_slow(rule) && !chunk.slow) refuse("slow must not be null for this rule");
}

}  // namespace
}  // namespace infinity::cpu_adam
