// The updates of the whole family as launches: how a call is cut into them, and what one thread of one does. Nothing here needs nvcc or a
// GPU but the words of CUDA, which tests/native/cuda/on_cpu has for the CPU.
#pragma once

#include "../cpu_adam/chunk.h"
#include "../cpu_adam/float_environment.h"
#include "octet.h"

namespace infinity::cuda {
namespace {

using namespace cpu_adam;

// Elements [begin, end) of a chunk, in groups that begin at multiples of kGroup: `count` of them, the first one, and those from `rest` on.
struct Launch {
  Chunk chunk;
  Constants constants;
  Noise noise;
  std::size_t begin, end, first, rest, count;
};

// The octets of a warp exchange values together, so a loop is as long for all of them.
constexpr std::size_t kTogether = 4;

// The groups of this thread's octet are every so many-th one from its own.
INFINITY_INLINE unsigned first_octet() { return (blockIdx.x * blockDim.x + threadIdx.x) / 8; }
INFINITY_INLINE unsigned octets() { return gridDim.x * blockDim.x / 8; }
// The first of the four elements of a group that are this thread's.
INFINITY_INLINE unsigned first_of_lane() { return threadIdx.x % 8 * 4; }

// Groups that are updated as a whole, at addresses that are multiples of four elements, in formats that the compiler knows: only then the
// loads of a group are all under way before the first of them is waited for. Elements and bytes are counted in 32 bits; `count` is a
// multiple of kTogether.
template <template <class> class RuleOf, Format format, Dtype grad, Master master>
INFINITY_INLINE void update_whole(const Launch& launch) {
  Chunk chunk = launch.chunk;
  chunk.grad_dtype = grad;
  chunk.master_format = master;
  chunk.moments = format;
  chunk.param_dtype = master == Master::none ? Dtype::fp32 : master == Master::split || chunk.param_dtype == Dtype::bf16 ? Dtype::bf16
                                                                                                                       : Dtype::fp16;
  // No address is null, so that none is compared with null. The parameter stands in for missing blocks, and is not read as one.
  if (master == Master::none) chunk.master = chunk.param;
  if (!RuleOf<Octet>::first) chunk.first = chunk.param;
  if (!RuleOf<Octet>::second) chunk.second = chunk.param;
  if (!RuleOf<Octet>::slow) chunk.slow = chunk.param;
  constexpr auto group = static_cast<unsigned>(kGroup);
  const auto first = static_cast<unsigned>(launch.first) * group, end = first + static_cast<unsigned>(launch.count) * group;
  const unsigned step = format == Format::fp32 ? octets() * group : kept(octets() * group);  // not at every turn, where registers suffice
  for (unsigned at = first + first_octet() * group + first_of_lane(); at < end; at += step) {
    const Run run = run_at<true>(chunk, at, kGroup, launch.noise, Streamed::nothing);
    if (!run.grad) __builtin_unreachable();
    update_group<Octet, RuleOf, format>(run, run, launch.constants, 0);
  }
}

// Room for the six parts of a group, and for the scale of no group: one for each lane, so that none waits for another.
struct alignas(16) Stage {
  unsigned char parts[6][kGroup * sizeof(float)];
  float scales[8];
};

// Any groups, also those of which only a part is updated, at any addresses, in any formats: copied beside zeros, updated, copied back.
// Every lane copies what it works on, so none waits for another. `stage` is the octet's own.
template <template <class> class RuleOf, Format format>
INFINITY_INLINE void update_any(const Launch& launch, Stage& stage) {
  Chunk chunk = launch.chunk;
  chunk.moments = format;
  for (std::size_t k = first_octet(); k / kTogether * kTogether < launch.count; k += octets()) {
    const bool idle = k >= launch.count;  // comes along for the exchanges
    const std::size_t at = (k == 0 || idle ? launch.first : launch.rest + (k - 1)) * kGroup + first_of_lane();
    const std::size_t from = at > launch.begin ? at : launch.begin, to = idle ? from : at + 4 < launch.end ? at + 4 : launch.end;
    Run run = run_at(chunk, at, kGroup, launch.noise, Streamed::nothing);
    if (idle) {
      float* const scale = stage.scales + threadIdx.x % 8;
      *scale = 0;
      run.first.scales = run.second.scales = run.slow.scales = scale;
    }
    void* const parts[6] = {const_cast<void*>(run.grad), run.param, run.master, run.first.values, run.second.values, run.slow.values};
    const std::size_t widths[6] = {bytes_of(chunk.grad_dtype), bytes_of(chunk.param_dtype), bytes_of(chunk.master_format), bytes_of(format),
                                   bytes_of(format), bytes_of(format)};
    INFINITY_UNROLL for (int part = 0; part < 6; ++part) {
      const std::size_t width = widths[part];
      unsigned char* const copy = stage.parts[part] + first_of_lane() * width;
      for (std::size_t byte = 0; byte < 4 * width; ++byte) copy[byte] = 0;
      if (!parts[part]) continue;
      const auto* const there = static_cast<const unsigned char*>(parts[part]);
      for (std::size_t i = from; i < to; ++i) {
        for (std::size_t byte = (i - at) * width; byte < (i - at + 1) * width; ++byte) copy[byte] = there[byte];
      }
    }
    const auto staged = [&](int part) { return stage.parts[part] + first_of_lane() * widths[part]; };
    run.grad = run.grad ? staged(0) : nullptr;
    run.param = staged(1);
    run.master = staged(2);
    run.first.values = staged(3);
    run.second.values = staged(4);
    run.slow.values = staged(5);
    update_group<Octet, RuleOf, format>(run, run, launch.constants, 0);
    INFINITY_UNROLL for (int part = 1; part < 6; ++part) {
      const std::size_t width = widths[part];
      const unsigned char* const copy = stage.parts[part] + first_of_lane() * width;
      if (!parts[part]) continue;
      auto* const there = static_cast<unsigned char*>(parts[part]);
      for (std::size_t i = from; i < to; ++i) {
        for (std::size_t byte = (i - at) * width; byte < (i - at + 1) * width; ++byte) there[byte] = copy[byte];
      }
    }
  }
}

// The kernels of a program that has them: Kernel is what it launches, made of update_whole and update_any by `Make`.
template <class Kernel, class Make>
struct Family {
  struct Row {
    Kernel* whole[3][3];  // by Dtype of the gradient and Master
    Kernel* any;
  };

  static const Row& row(Rule rule, Format format, const Hyper& hyper) {
    static constexpr Row rows[kRules][kFormats] = {
        {make<Adam, Format::fp32>(), make<Adam, Format::bf16>(), make<Adam, Format::int8>()},
        {make<Adagrad, Format::fp32>(), make<Adagrad, Format::bf16>(), make<Adagrad, Format::int8>()},
        {make<Lion, Format::fp32>(), make<Lion, Format::bf16>(), make<Lion, Format::int8>()},
        {make<AdEMAMix, Format::fp32>(), make<AdEMAMix, Format::bf16>(), make<AdEMAMix, Format::int8>()},
        {make<Sgd, Format::fp32>(), make<Sgd, Format::fp32>(), make<Sgd, Format::fp32>()},
        {make<Momentum, Format::fp32>(), make<Momentum, Format::bf16>(), make<Momentum, Format::int8>()}};
    return rows[row_of(rule, hyper)][static_cast<int>(format)];
  }

 private:
  template <template <class> class RuleOf, Format format>
  static constexpr Row make() {
    return {{{whole<RuleOf, format, Dtype::fp32, Master::none>(), whole<RuleOf, format, Dtype::fp32, Master::fp32>(),
              whole<RuleOf, format, Dtype::fp32, Master::split>()},
             {whole<RuleOf, format, Dtype::bf16, Master::none>(), whole<RuleOf, format, Dtype::bf16, Master::fp32>(),
              whole<RuleOf, format, Dtype::bf16, Master::split>()},
             {whole<RuleOf, format, Dtype::fp16, Master::none>(), whole<RuleOf, format, Dtype::fp16, Master::fp32>(),
              whole<RuleOf, format, Dtype::fp16, Master::split>()}},
            Make::template any<RuleOf, format>()};
  }
  template <template <class> class RuleOf, Format format, Dtype grad, Master master>
  static constexpr Kernel* whole() {
    return Make::template whole<RuleOf, format, grad, master>();
  }
};

// So that a lane can take four elements at once.
inline bool aligned(const void* address, std::size_t width) {
  return width == 0 || reinterpret_cast<std::uintptr_t>(address) % (4 * width) == 0;
}

// The chunk from the superblock on in which a group lies.
inline Chunk from_superblock(const Chunk& chunk, std::size_t group) {
  const std::size_t at = group * kGroup / kSuperblock * kSuperblock;
  const Run run = run_at(chunk, at, 0, {}, Streamed::nothing);
  Chunk rest = chunk;
  rest.grad = run.grad;
  rest.param = run.param;
  rest.master = run.master;
  rest.first = run.first.values;
  rest.second = run.second.values;
  rest.slow = run.slow.values;
  rest.position += at;
  return rest;
}

// Of one launch, so that its bytes, and those of a superblock before them, are counted in 32 bits.
constexpr std::size_t kMostElements = std::size_t{1} << 29;

// Checks the arguments of update() and calls submit(kernel, launch) for each of its launches.
template <class Kernels, class Submit>
void cut(Rule rule, Chunk chunk, std::size_t begin, std::size_t end, const Hyper& hyper, const Submit& submit) {
  check(rule, chunk, begin, end, hyper);
  const DefaultFloatEnvironment environment;  // as on the CPU, whatever rounding mode the caller is in
  Constants constants(hyper);
  constants.ordinary = Quick<Octet>::ordinary(rule, constants);
  if (!has_first(rule, hyper)) chunk.first = nullptr;  // whatever a rule does not use is left alone
  if (!has_second(rule)) chunk.second = nullptr;
  if (!has_slow(rule)) chunk.slow = nullptr;
  if (!chunk.first && !chunk.second) chunk.moments = Format::fp32;
  const auto& kernels = Kernels::row(rule, chunk.moments, hyper);
  const bool fast = chunk.grad && aligned(chunk.grad, bytes_of(chunk.grad_dtype)) && aligned(chunk.param, bytes_of(chunk.param_dtype)) &&
                    aligned(chunk.master, bytes_of(chunk.master_format)) &&
                    aligned(chunk.first, bytes_of(chunk.moments)) && aligned(chunk.second, bytes_of(chunk.moments)) &&
                    aligned(chunk.slow, bytes_of(chunk.moments));
  while (begin < end) {
    const std::uint64_t number = chunk.position + begin;
    std::size_t stop = begin + same_noise(chunk.moments, number, end - begin);
    stop = std::min(stop, begin / kGroup * kGroup + kMostElements);
    Launch launch{chunk, constants, make_noise(chunk.key, number), begin, stop, begin / kGroup, begin / kGroup + 1, 0};
    const std::size_t whole = (begin + kGroup - 1) / kGroup, last = (stop - 1) / kGroup;
    const std::size_t whole_end = fast && whole < stop / kGroup ? whole + (stop / kGroup - whole) / kTogether * kTogether : whole;
    if (whole == whole_end) {
      launch.count = last - launch.first + 1;
      submit(kernels.any, launch);
    } else {
      const std::size_t head = whole - launch.first, tail = last + 1 - whole_end;
      if (head + tail > 0) {
        launch.first = head > 0 ? launch.first : whole_end;
        launch.rest = head > 0 ? whole_end : whole_end + 1;
        launch.count = head + tail;
        submit(kernels.any, launch);
      }
      const std::size_t first = whole % (kSuperblock / kGroup), count = whole_end - whole;
      launch = {from_superblock(chunk, whole), constants, launch.noise, first * kGroup, (first + count) * kGroup, first, first + 1, count};
      submit(kernels.whole[static_cast<int>(chunk.grad_dtype)][static_cast<int>(chunk.master_format)], launch);
    }
    begin = stop;
  }
}

}  // namespace
}  // namespace infinity::cuda
