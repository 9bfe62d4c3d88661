// The public functions: choose the kernels for this CPU, cut the work into ranges for the pool and into runs for a kernel.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "chunk.h"
#include "float_environment.h"
#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace infinity::cpu_adam {
namespace {

const Kernels& kernels(Isa isa) {
  if (!has_isa(isa)) throw std::invalid_argument("this CPU lacks the requested instruction set");
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512_kernels;
  if (isa == Isa::avx2) return avx2_kernels;
#elif defined(__aarch64__)
  if (isa == Isa::neon) return neon_kernels;
#endif
  return scalar_kernels;
}

#if defined(__x86_64__)
// __builtin_cpu_supports also asks whether the operating system saves the wide registers; not every supported compiler knows "f16c".
bool detect(Isa isa) {
  unsigned eax, ebx, ecx, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  const bool avx2 = f16c && __builtin_cpu_supports("avx2");
  return isa == Isa::avx2 ? avx2 : avx2 && __builtin_cpu_supports("avx512f");
}
#endif

constexpr std::size_t kGrain = 64;  // elements: whole groups, and two threads never write to one line of an aligned array

// The most of n elements from `at` that lie in one piece.
std::size_t piece(Format format, std::size_t at, std::size_t n) {
  return format == Format::int8 ? std::min(n, kSuperblock - at % kSuperblock) : n;
}

// One call of `update`: the part that is the same for all its ranges.
struct Work {
  UpdateKernel* kernel;
  const Chunk& chunk;
  const Constants& constants;
  Streamed streamed;
  const Chunk& target;  // the chunk itself, or where what becomes of it goes

  void range(std::size_t begin, std::size_t end) const {
    while (begin < end) {
      const std::uint64_t number = chunk.position + begin;
      const std::size_t n = same_noise(chunk.moments, number, piece(chunk.moments, begin, end - begin));
      const Run run = run_at(chunk, begin, n / kGroup * kGroup, make_noise(chunk.key, number), streamed);
      const Run to = run_at(target, begin, run.n, run.noise, streamed);
      if (run.n > 0) {
        kernel(run, &target == &chunk ? run : to, constants);
      } else {
        part(run, to, n);
      }
      begin += run.n > 0 ? run.n : n;
    }
  }

 private:
  // The first n elements of a group: copied beside zeros, updated, copied to where they belong. So kernels know whole groups only.
  void part(Run run, Run to, std::size_t n) const {
    struct Copy {
      const void* from;
      void* to;
      std::size_t bytes;
      alignas(64) unsigned char memory[kGroup * sizeof(float)];
    };
    const std::size_t moments = n * bytes_of(chunk.moments);
    Copy copies[6] = {{run.grad, nullptr, n * bytes_of(run.grad_dtype), {}}, {run.param, to.param, n * bytes_of(run.param_dtype), {}},
                      {run.master, to.master, n * bytes_of(run.master_format), {}}, {run.first.values, to.first.values, moments, {}},
                      {run.second.values, to.second.values, moments, {}},
                      {run.slow.values, to.slow.values, moments, {}}};
    for (Copy& copy : copies) {
      if (copy.from) std::memcpy(copy.memory, copy.from, copy.bytes);
    }
    run.grad = run.grad ? copies[0].memory : nullptr;
    to.param = run.param = copies[1].memory;
    to.master = run.master = copies[2].memory;
    to.first.values = run.first.values = copies[3].memory;
    to.second.values = run.second.values = copies[4].memory;
    to.slow.values = run.slow.values = copies[5].memory;
    to.streamed = Streamed::nothing;
    run.n = kGroup;
    kernel(run, to, constants);
    for (const Copy& copy : copies) {
      if (copy.to) std::memcpy(copy.to, copy.memory, copy.bytes);
    }
  }
};

}  // namespace

bool has_isa(Isa isa) {
  if (isa == Isa::scalar) return true;
#if defined(__x86_64__)
  static const bool avx2 = detect(Isa::avx2), avx512 = detect(Isa::avx512);  // kept: a virtual machine traps cpuid
  return isa == Isa::avx2 ? avx2 : isa == Isa::avx512 && avx512;
#elif defined(__aarch64__)
  return isa == Isa::neon;  // every AArch64 has it
#else
  return false;
#endif
}

Isa best_isa() {
  for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::neon}) {
    if (has_isa(isa)) return isa;
  }
  return Isa::scalar;
}

std::size_t block_bytes(Format format, std::size_t elements) {
  if (format != Format::int8) return elements * bytes_of(format);
  return (elements + kSuperblock - 1) / kSuperblock * kSuperblockBytes;
}

void update(Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper, Isa isa, Pool& pool,
            const Targets& targets) {
  check(rule, chunk, begin, end, hyper);
  const Kernels& all = kernels(isa);
  const DefaultFloatEnvironment environment;  // the constants are rounded too
  const Constants constants(hyper);
  Chunk apart = chunk;
  if (targets.param) apart.param = targets.param;
  if (targets.master) apart.master = targets.master;
  if (targets.first) apart.first = targets.first;
  if (targets.second) apart.second = targets.second;
  if (targets.slow) apart.slow = targets.slow;
  const bool in_place = apart.param == chunk.param && apart.master == chunk.master && apart.first == chunk.first &&
                        apart.second == chunk.second && apart.slow == chunk.slow;
  // A streaming store is of whole cache lines here. They pay where a line is not read: with an fp32 master, and in another place.
  const auto lines = [&](const void* to, std::size_t width) { return (reinterpret_cast<std::uintptr_t>(to) + begin * width) % 64 == 0; };
  const auto moved = [&](const void* to, const void* from, std::size_t width) { return !from || (to != from && lines(to, width)); };
  const bool moments = chunk.moments == Format::int8 || (moved(apart.first, chunk.first, bytes_of(chunk.moments)) &&
                                                          moved(apart.second, chunk.second, bytes_of(chunk.moments)) &&
                                                          moved(apart.slow, chunk.slow, bytes_of(chunk.moments)));
  Streamed streamed = Streamed::nothing;
  if (lines(apart.param, bytes_of(chunk.param_dtype)) && (apart.param != chunk.param || chunk.master_format == Master::fp32)) {
    const bool all = apart.param != chunk.param && moved(apart.master, chunk.master, bytes_of(chunk.master_format)) && moments;
    streamed = all ? Streamed::all : Streamed::param;
  }
  const Work work{all.update[row_of(rule, hyper)][static_cast<int>(chunk.moments)], chunk, constants, streamed, in_place ? chunk : apart};
  pool.run(end - begin, kGrain, [&](std::size_t from, std::size_t to) { work.range(begin + from, begin + to); });
}

void decode(const void* block, Format format, Moment moment, float* values, std::size_t begin, std::size_t n) {
  DecodeKernel* const kernel = kernels(best_isa()).decode[static_cast<int>(format)][static_cast<int>(moment)];
  const DefaultFloatEnvironment environment;
  while (n > 0) {
    const std::size_t in_group = format == Format::int8 ? begin % kGroup : 0;
    std::size_t count = piece(format, begin, n);
    const Moments from = locate(const_cast<void*>(block), format, begin - in_group);
    if (in_group == 0 && count >= kGroup) {
      count = count / kGroup * kGroup;
      kernel(from, values, count);
    } else {
      count = std::min(count, kGroup - in_group);
      unsigned char copy[kGroup * sizeof(float)] = {};
      float whole[kGroup];
      std::memcpy(copy, from.values, (in_group + count) * bytes_of(format));
      kernel({copy, from.scales}, whole, kGroup);
      std::memcpy(values, whole + in_group, count * sizeof(float));
    }
    begin += count;
    values += count;
    n -= count;
  }
}

void encode(void* block, Format format, Moment moment, const float* values, std::size_t begin, std::size_t n) {
  if (format == Format::int8 && begin % kGroup != 0) throw std::invalid_argument("begin must be a multiple of 32 for int8");
  EncodeKernel* const kernel = kernels(best_isa()).encode[static_cast<int>(format)][static_cast<int>(moment)];
  const DefaultFloatEnvironment environment;
  while (n > 0) {
    std::size_t count = piece(format, begin, n);
    const Moments to = locate(block, format, begin);
    if (count >= kGroup) {
      count = count / kGroup * kGroup;
      kernel(to, values, count);
    } else {
      float whole[kGroup] = {};
      unsigned char copy[kGroup * sizeof(float)];
      std::memcpy(whole, values, count * sizeof(float));
      kernel({copy, to.scales}, whole, kGroup);
      std::memcpy(to.values, copy, (format == Format::int8 ? kGroup : count) * bytes_of(format));
    }
    begin += count;
    values += count;
    n -= count;
  }
}

void join(const std::uint16_t* param, const std::int16_t* low, float* values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = from_bits((std::uint32_t{param[i]} << 16) + static_cast<std::uint32_t>(std::int32_t{low[i]}));
  }
}

void split(const float* values, std::uint16_t* param, std::int16_t* low, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t bits = to_bits(canonical(values[i])), high = (bits + 0x8000) >> 16;
    param[i] = static_cast<std::uint16_t>(high);
    low[i] = static_cast<std::int16_t>(bits - (high << 16));
  }
}

double squared_norm(const void* values, Dtype dtype, std::size_t n, double carry, Isa isa, Pool& pool) {
  NormKernel* const kernel = kernels(isa).norm_blocks;
  constexpr std::size_t kAtOnce = 2048;  // blocks: 16 KiB of sums, and 32M elements for the pool's threads
  double sums[kAtOnce];
  for (std::size_t done = 0; done < n; done += kAtOnce * kNormBlock) {
    const std::size_t count = std::min(n - done, kAtOnce * kNormBlock);
    const void* const from = offset(values, done * bytes_of(dtype));
    // Ranges begin at multiples of so many blocks, and all but the last end at one.
    pool.run(count, kNormBlocksAtOnce * kNormBlock, [&](std::size_t begin, std::size_t end) {
      kernel(offset(from, begin * bytes_of(dtype)), dtype, end - begin, sums + begin / kNormBlock);
    });
    const DefaultFloatEnvironment environment;
    for (std::size_t block = 0; block * kNormBlock < count; ++block) carry += sums[block];
  }
  return carry == carry ? carry : std::numeric_limits<double>::quiet_NaN();  // one NaN, as in convert.h [Note: NaN]
}

void add(void* target, const void* source, Dtype dtype, std::size_t n, Isa isa, Pool& pool) {
  AddKernel* const kernel = kernels(isa).add[static_cast<int>(dtype)];
  const std::size_t width = bytes_of(dtype);
  pool.run(n, kGrain, [&](std::size_t begin, std::size_t end) {
    const std::size_t rest = (end - begin) % kGroup, whole = end - rest;
    kernel(offset(target, begin * width), offset(source, begin * width), whole - begin);
    if (rest == 0) return;
    // Copied beside zeros, as a part of a chunk is.
    alignas(64) unsigned char to[kGroup * sizeof(float)] = {}, from[kGroup * sizeof(float)] = {};
    std::memcpy(to, offset(target, whole * width), rest * width);
    std::memcpy(from, offset(source, whole * width), rest * width);
    kernel(to, from, kGroup);
    std::memcpy(offset(target, whole * width), to, rest * width);
  });
}

void copy(void* target, const void* source, std::size_t n, Pool& pool) {
  pool.run(n, 4096, [&](std::size_t begin, std::size_t end) {
    std::memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin, end - begin);
  });
}

void in_place_update(float* a, const float* b, float* c, std::size_t n, Pool& pool) {
  InPlaceKernel* const kernel = kernels(best_isa()).in_place;
  pool.run(n, kGrain, [&](std::size_t begin, std::size_t end) { kernel(a + begin, b + begin, c + begin, end - begin); });
}

void shadow_update(const float* a, const float* b, const float* c, float* to_a, float* to_c, std::size_t n, Pool& pool) {
  ShadowKernel* const kernel = kernels(best_isa()).shadow;
  const bool streamed = (reinterpret_cast<std::uintptr_t>(to_a) | reinterpret_cast<std::uintptr_t>(to_c)) % 64 == 0;
  pool.run(n, kGrain, [&](std::size_t begin, std::size_t end) {
    kernel(a + begin, b + begin, c + begin, to_a + begin, to_c + begin, end - begin, streamed);
  });
}

}  // namespace infinity::cpu_adam
