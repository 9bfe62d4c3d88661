// Do the CUDA kernels, run by threads of the CPU in the place of lanes, equal the scalar specification bit for bit: every rule, every format,
// any value, parts of groups, odd addresses, however many blocks share the work?
#include "lanes.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpu_adam.h"
#include "pool.h"

#include "../../../native/cuda/launch.h"

using namespace infinity::cuda;

namespace {

using Kernel = void(const Launch&, Stage&);

template <template <class> class RuleOf, Format format, Dtype grad, Master master>
void whole_kernel(const Launch& launch, Stage&) {
  update_whole<RuleOf, format, grad, master>(launch);
}

template <template <class> class RuleOf, Format format>
void any_kernel(const Launch& launch, Stage& stage) {
  update_any<RuleOf, format>(launch, stage);
}

// Compilers take minutes for all of them with a sanitizer; one gradient format then stands for the three.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kFew = true;
#else
constexpr bool kFew = false;
#endif

struct MakeKernels {
  template <template <class> class RuleOf, Format format, Dtype grad, Master master>
  static constexpr Kernel* whole() {
    if constexpr (kFew && grad != Dtype::bf16) {
      return any_kernel<RuleOf, format>;
    } else {
      return whole_kernel<RuleOf, format, grad, master>;
    }
  }
  template <template <class> class RuleOf, Format format>
  static constexpr Kernel* any() {
    return any_kernel<RuleOf, format>;
  }
};
using Kernels = Family<Kernel, MakeKernels>;

using Bytes = std::vector<unsigned char>;

struct Formats {
  Dtype grad, param;
  Master master;
  Format moments;
};

// What a call gets, `shift` elements behind the beginning of its memory, which ends with it: the address sanitizer sees the first byte
// too many.
struct Problem {
  Formats formats;
  std::size_t n, shift;
  Bytes grad, param, master, first, second;

  Chunk chunk(std::uint64_t position) {
    const std::size_t moment = formats.moments == Format::int8 ? 0 : shift * bytes_of(formats.moments);
    return {grad.empty() ? nullptr : grad.data() + shift * bytes_of(formats.grad), formats.grad,
            param.data() + shift * bytes_of(formats.param), formats.param,
            formats.master == Master::none ? nullptr : master.data() + shift * bytes_of(formats.master), formats.master,
            first.data() + moment, second.data() + moment, formats.moments, position, 99};
  }
};

// Random bit patterns hold every class of value; half of them are drawn again from a range where the update is an ordinary one.
Bytes random_values(std::mt19937& random, std::size_t width, std::size_t n) {
  static const std::uint32_t special[] = {0, 0x80000000, 1, 0x807fffff, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fa00001, 0xffc00000};
  Bytes values(n * width);
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t bits = random();
    if (width == 4 && i % 2 == 0) bits = (bits & 0x80ffffff) | 0x3f000000;
    if (width == 4 && i % 31 == 0) bits = special[bits % 9];
    std::memcpy(values.data() + i * width, &bits, width);
  }
  return values;
}

// int8: any codes, and scales of which most are ordinary. The others: some groups of numbers that go together, some of zeros.
Bytes random_moments(std::mt19937& random, Format format, std::size_t n) {
  if (format != Format::int8) return random_values(random, bytes_of(format), n);
  Bytes block = random_values(random, 1, block_bytes(format, n));
  for (std::size_t superblock = 0; superblock < block.size(); superblock += kSuperblockBytes) {
    const Bytes scales = random_values(random, 4, kSuperblock / kGroup);
    std::memcpy(block.data() + superblock + kSuperblock, scales.data(), scales.size());
  }
  return block;
}

Problem make_problem(unsigned seed, const Formats& f, std::size_t n, std::size_t shift) {
  std::mt19937 random(seed);
  const std::size_t all = n + shift;
  Problem p{f, n, shift, random_values(random, bytes_of(f.grad), all), random_values(random, bytes_of(f.param), all),
            random_values(random, bytes_of(f.master), f.master == Master::none ? 0 : all), random_moments(random, f.moments, all),
            random_moments(random, f.moments, all)};
  if (f.grad == Dtype::fp32) {  // ordinary groups, among which int8 moments are not NaN, and groups of zeros
    for (std::size_t i = 0; i < all; ++i) {
      const float value = i / kGroup % 4 == 3 ? 0.0f : 1e-3f * static_cast<float>(static_cast<int>(i * 2654435761u % 2001) - 1000);
      if (i / kGroup % 4 != 0) std::memcpy(p.grad.data() + 4 * i, &value, 4);
    }
  }
  if (seed % 17 == 0) p.grad.clear();
  return p;
}

Problem updated_by_cpu(Problem p, Rule rule, std::size_t begin, std::size_t end, std::uint64_t position, const Hyper& hyper, Pool& pool) {
  infinity::cpu_adam::update(rule, p.chunk(position), begin, end, hyper, Isa::scalar, pool);
  return p;
}

int wholes = 0, others = 0;

Problem updated_by_lanes(Problem p, Rule rule, std::size_t begin, std::size_t end, std::uint64_t position, const Hyper& hyper,
                         unsigned blocks) {
  cut<Kernels>(rule, p.chunk(position), begin, end, hyper, [&](Kernel* kernel, const Launch& launch) {
    ++(kernel != Kernels::row(rule, launch.chunk.moments, hyper).any ? wholes : others);
    std::vector<Stage> stages(blockDim.x / 8);
    run_grid(blocks, [&](unsigned octet) { kernel(launch, stages[octet]); });
  });
  return p;
}

bool agree(unsigned seed, Rule rule, const Formats& f, std::size_t n, std::size_t shift, std::size_t begin, std::size_t end,
           std::uint64_t position, Pool& pool) {
  const double weight_decay = seed % 3 == 0 ? 0 : 0.1;
  const Hyper hyper{1e-3, 0.9, 0.999, 1e-8, weight_decay, 0.1, 0.0316, 0.7, seed % 2 == 0, seed % 4 == 0 ? 0 : 0.9, 0.1, seed % 5 < 2,
                    seed % 7 == 0};
  const Problem problem = make_problem(seed, f, n, shift);
  const Problem expected = updated_by_cpu(problem, rule, begin, end, position, hyper, pool);
  // Four groups to a block: one block goes round three times for the usual 10 groups, two go round once and a half, and of five some idle.
  for (const unsigned blocks : {1, 2, 5}) {
    const Problem result = updated_by_lanes(problem, rule, begin, end, position, hyper, blocks);
    if (result.param == expected.param && result.master == expected.master && result.first == expected.first &&
        result.second == expected.second) {
      continue;
    }
    std::printf("seed %u: rule %d, moments %d, gradient %d, param %d, master %d, [%zu, %zu) of %zu, shift %zu, %u blocks:%s%s%s%s\n", seed,
                static_cast<int>(rule), static_cast<int>(f.moments), static_cast<int>(f.grad), static_cast<int>(f.param),
                static_cast<int>(f.master), begin, end, n, shift, blocks, result.param == expected.param ? "" : " param",
                result.master == expected.master ? "" : " master", result.first == expected.first ? "" : " first",
                result.second == expected.second ? "" : " second");
    return false;
  }
  return true;
}

// Of a chunk of more elements than a launch counts; nothing of it is read.
bool every_group_once() {
  alignas(16) static unsigned char there[16];
  const Chunk chunk{there, Dtype::bf16, there, Dtype::fp32, nullptr, Master::none, there, there, Format::fp32, 0, 0};
  const std::size_t begin = 37, end = 2 * kMostElements + 1000;
  std::vector<std::pair<std::size_t, std::size_t>> stretches;
  cut<Kernels>(Rule::adam, chunk, begin, end, Hyper{}, [&](Kernel* kernel, const Launch& launch) {
    if (kernel == Kernels::row(Rule::adam, Format::fp32, Hyper{}).any) {
      stretches.emplace_back(launch.first, launch.first + 1);
      stretches.emplace_back(launch.rest, launch.rest + launch.count - 1);
    } else {
      const auto before = reinterpret_cast<std::uintptr_t>(launch.chunk.param) - reinterpret_cast<std::uintptr_t>(chunk.param);
      const std::size_t first = before / (kGroup * sizeof(float)) + launch.first;
      stretches.emplace_back(first, first + launch.count);
      if ((launch.first + launch.count) * kGroup * sizeof(float) >> 32 != 0) stretches.clear();
    }
  });
  std::sort(stretches.begin(), stretches.end());
  std::size_t next = begin / kGroup;
  for (const auto& [first, last] : stretches) {
    if (first == last) continue;
    if (first != next) break;
    next = last;
  }
  if (next == (end + kGroup - 1) / kGroup) return true;
  std::printf("group %zu is updated twice or not at all\n", next);
  return false;
}

}  // namespace

int main() {
  Pool pool(1);
  unsigned seed = 0;
  bool well = true;
  for (const Rule rule : {Rule::adam, Rule::adagrad, Rule::lion, Rule::sgd}) {
    for (const Format moments : {Format::fp32, Format::bf16, Format::int8}) {
      for (const Dtype grad : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
        for (const auto& [param, master] : {std::pair{Dtype::fp32, Master::none}, {Dtype::bf16, Master::fp32}, {Dtype::fp16, Master::fp32},
                                            {Dtype::bf16, Master::split}}) {
          const Formats formats{grad, param, master, moments};
          const std::size_t begin = moments == Format::fp32 ? 37 : 32;
          well &= agree(++seed, rule, formats, 320, 0, 0, 320, (1ull << 32) - 64, pool);  // the element numbers pass 2^32
          well &= agree(++seed, rule, formats, 333, 0, begin, 330, 0, pool);              // parts of groups at both ends
          well &= agree(++seed, rule, formats, 70, 0, begin, begin + 3, 64, pool);        // nothing but a part of a group
          well &= agree(++seed, rule, formats, 150, 1, 0, 149, 0, pool);                  // addresses that are no multiples of four elements
        }
      }
      const Formats formats{Dtype::bf16, Dtype::bf16, Master::split, moments};
      well &= agree(++seed, rule, formats, kSuperblock + 77, 0, kSuperblock - 64, kSuperblock + 77, 0, pool);  // two superblocks
      well &= agree(++seed, rule, formats, kSuperblock + 500, 0, kSuperblock + 96, kSuperblock + 500, 0, pool);      // the second alone
    }
  }
  well &= every_group_once();
  if (wholes < 100 || others < 100) {
    std::printf("only %d and %d launches of either kind\n", wholes, others);
    well = false;
  }
  try {
    updated_by_lanes(make_problem(1, {Dtype::fp32, Dtype::fp32, Master::none, Format::int8}, 64, 0), Rule::adam, 1, 64, 0, Hyper{}, 1);
    std::printf("a group was not begun at its beginning, and nobody refused\n");
    well = false;
  } catch (const std::invalid_argument&) {
  }
  return well ? 0 : 1;
}
