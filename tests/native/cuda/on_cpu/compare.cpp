// Do the kernels of native/cuda have the bits of the scalar specification? All of them, with every rule, format and way through a kernel:
// parts of groups, odd addresses, several superblocks, numbers that pass 2^32, any value, one to seven blocks, threads in any order, and
// approximations with any error that PTX allows.
//
//   cuda_on_cpu [few] [name=value ...]    few: all kernels, and fewer values; settings as in on_cpu.h
#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "on_cpu.h"
#include "pool.h"

#include "../../../../native/cuda/device.h"
#include "../../../../native/cuda/kernels.h"
#include "../../../../native/cuda/launch.h"

using namespace infinity::cuda;

namespace {

constexpr int kDevice = 40;  // the kernels remember nothing of this one, so every launch may have another grid
constexpr int kParts = 6;
const char* const kNames[kParts] = {"grad", "param", "master", "first", "second", "slow"};

bool few = false;
long compared = 0, wrong = 0;
unsigned seed = 0;
Pool& pool() {
  static Pool one(1);
  return one;
}

// Values. Each group has one kind of them, for a group of ordinary numbers takes another way than any other.
using Random = std::mt19937;
enum Kind { kUsual, kSmall, kZeros, kSubnormal, kWide, kPowers, kSpecial, kAny, kKinds };

float value_of(int kind, Random& random) {
  const auto bits = static_cast<std::uint32_t>(random());
  const float part = static_cast<float>(bits >> 8) * 0x1p-23f - 1, sign = bits & 1 ? -1.0f : 1.0f;
  static const std::uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7fa00001, 0x7f7fffff, 0x00800000, 1, 0, 0x3f800000};
  switch (kind) {
    case kUsual: return part;
    case kSmall: return 0.01f * part;
    case kZeros: return 0 * sign;
    case kSubnormal: return from_bits(bits & 0x807fffff);
    case kWide: return std::ldexp(part, static_cast<int>(bits % 64) - 32);
    case kPowers: return sign * std::ldexp(1.0f, static_cast<int>(bits % 254) - 126);
    case kSpecial: return from_bits(special[bits % 10]);
    default: return from_bits(bits);
  }
}

struct Formats {
  Dtype grad, param;
  Master master;
  Format moments;
  std::size_t width(int part) const {
    const std::size_t widths[kParts] = {bytes_of(grad), bytes_of(param), bytes_of(master), bytes_of(moments), bytes_of(moments),
                                        bytes_of(moments)};
    return widths[part];
  }
};

struct Shape {
  const char* name;
  std::size_t n, begin, end;
  std::uint64_t position = 0;
  std::size_t shifts[kParts] = {};  // by how many elements, or words of int8 moments, each part lies further on
  bool no_grad = false;
  std::size_t absent = 0;  // elements at the beginning without memory: whole superblocks
};

// The memory of a chunk. Every part ends with its last element, or with bytes that must stay.
struct Problem {
  Formats formats;
  const Shape* shape;
  std::vector<unsigned char> parts[kParts];

  bool has_codes(int part) const { return part >= 3 && formats.moments == Format::int8; }
  std::size_t shift(int part) const { return shape->shifts[part] * (has_codes(part) ? sizeof(float) : formats.width(part)); }
  void* at(int part) {
    if (parts[part].empty() || (part == 0 && shape->no_grad)) return nullptr;
    const std::size_t absent = has_codes(part) ? shape->absent / kSuperblock * kSuperblockBytes : shape->absent * formats.width(part);
    return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(parts[part].data()) + shift(part) - absent);
  }
  Chunk chunk() {
    return {at(0), formats.grad, at(1), formats.param, at(2), formats.master, at(3), at(4), formats.moments, shape->position, seed,
            at(5)};
  }
};

void put(unsigned char* at, std::size_t width, bool is_fp16, float x) {
  std::uint32_t bits = is_fp16 ? std::uint32_t{to_fp16(x)} << 16 : to_bits(x);
  if (width == 2) bits >>= 16;
  std::memcpy(at, &bits, width);
}

Problem make_problem(const Formats& formats, const Shape& shape) {
  Problem made{formats, &shape, {}};
  Random random(seed);
  const std::size_t n = shape.n - shape.absent, guard = seed % 2 * 64;
  for (int part = 0; part < kParts; ++part) {
    const std::size_t width = formats.width(part), shift = made.shift(part);
    if (width == 0) continue;
    auto& bytes = made.parts[part];
    bytes.resize(shift + (made.has_codes(part) ? block_bytes(Format::int8, n) : n * width));
    for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint32_t)) {
      const auto bits = static_cast<std::uint32_t>(random());
      std::memcpy(bytes.data() + i, &bits, std::min(sizeof bits, bytes.size() - i));
    }
    int kind = kUsual;
    const auto draw = [&](bool begins) {
      if (begins) kind = std::max(0, static_cast<int>(random() % (kKinds + 4)) - 4);
      const float x = value_of(kind, random);
      return part == 4 && kind != kAny ? std::fabs(x) : x;  // a second moment has no sign, as a rule
    };
    if (made.has_codes(part)) {
      for (std::size_t at = shift; at < bytes.size(); at += kSuperblockBytes) {
        for (std::size_t group = 0; group < kSuperblock / kGroup; ++group) {
          put(bytes.data() + at + kSuperblock + group * sizeof(float), sizeof(float), false, std::fabs(draw(true)));
        }
      }
    } else if (part != 2 || formats.master != Master::split) {  // which are any bits
      for (std::size_t i = 0; i < n; ++i) put(bytes.data() + shift + i * width, width, part == 0 && formats.grad == Dtype::fp16, draw(i % kGroup == 0));
    }
    bytes.resize(bytes.size() + guard, 0xa5);
  }
  return made;
}

struct Step {
  const char* name;
  Hyper hyper;
};
const Step kSteps[] = {
    {"usual", {1e-3, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.0316, 0.7, true, 0.9, 0.1, false, false, 0.9999, 5.0}},
    {"coupled, without momentum", {1e-2, 0.9, 0.99, 1e-6, 0.05, 0.27, 0.17, 1.0, false, 0.0, 0.0, false, false, 0.99, 0.5}},
    {"no decay, Nesterov", {1e-3, 0.95, 0.999, 1e-8, 0.0, 0.5, 0.9, 1.0, true, 0.8, 0.0, true, false, 0.999, 8.0}},
    {"first step, eps 0", {0.0, 0.9, 0.999, 0.0, 0.0, 0.1, 0.0316, 1.0, true, 0.9, 0.5, false, true, 0.9, 0.0}},
    {"huge", {1e30, 0.9, 0.999, 1e-8, 0.1, 0.1, 0.0316, -1e-40, true, 0.9, 0.3, true, false, 0.9999, 1e30}},
    {"constants out of the ordinary", {1e-3, 0.9, 0.999, 1e8, 0.1, 0.1, 1e-6, 3.0, false, 0.9, 0.0, false, false, 0.9999, 5.0}},
};

// How the caller rounds, which must not matter; and the device that it has.
class Caller {
 public:
  Caller() {
    std::fegetenv(&before_);
    if (seed % 5 == 0) std::fesetround(FE_UPWARD);
    on_cpu_set("multiprocessors", seed % 3 == 0 ? 7 : seed % 3);
    on_cpu_set("order", seed % 4 < 2 ? seed % 4 : seed);
    on_cpu_set("error", seed % 4);  // within what PTX allows
  }
  ~Caller() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

void compare_update(Rule rule, const Formats& formats, const Shape& shape, const Step& step) {
  ++seed;
  Problem expected = make_problem(formats, shape), found = expected;
  {
    const Caller caller;
    update(rule, expected.chunk(), shape.begin, shape.end, step.hyper, Isa::scalar, pool());
    update(rule, found.chunk(), shape.begin, shape.end, step.hyper, std::uintptr_t{0});
  }
  ++compared;
  for (int part = 0; part < kParts; ++part) {
    if (found.parts[part] == expected.parts[part]) continue;
    const auto at = std::mismatch(found.parts[part].begin(), found.parts[part].end(), expected.parts[part].begin()).first;
    if (++wrong < 40) {
      std::printf("seed %u: rule %d (%s), moments %d, gradient %d, param %d, master %d, %s: %s differs from byte %td on\n", seed,
                  static_cast<int>(rule), step.name, static_cast<int>(formats.moments), static_cast<int>(formats.grad),
                  static_cast<int>(formats.param), static_cast<int>(formats.master), shape.name, kNames[part], at - found.parts[part].begin());
    }
  }
}

std::vector<Shape> shapes_of(Format moments) {
  const std::size_t begin = moments == Format::fp32 ? 37 : 32, far = std::size_t{1} << 33;
  std::vector<Shape> shapes = {{"numbers pass 2^32", 320, 0, 320, (std::uint64_t{1} << 32) - 64},
                               {"parts at both ends", 333, begin, 330},
                               {"odd addresses", 150, 0, 149, 0, {1, 1, 1, 1, 1, 1}}};
  if (!few) {
    shapes.insert(shapes.end(), {{"a part of a group", 70, begin, begin + 3, 64},
                                 {"one element", 1, 0, 1},
                                 {"a group less one", 31, 0, 31},
                                 {"a group and one", 33, 0, 33},
                                 {"four groups", 128, 0, 128},
                                 {"four groups and one", 129, 0, 129},
                                 {"five groups less one", 159, 0, 159},
                                 {"many groups", 3001, 0, 3001},
                                 {"an odd gradient", 640, 0, 640, 0, {1, 0, 0, 0, 0}},
                                 {"an odd parameter", 640, 0, 640, 0, {0, 2, 0, 0, 0}},
                                 {"an odd master", 640, 0, 640, 0, {0, 0, 3, 0, 0}},
                                 {"odd moments", 640, 0, 640, 0, {0, 0, 0, 1, 3, 2}},
                                 {"four elements on", 640, 32, 608, 32, {4, 4, 4, 4, 4, 4}},
                                 {"no gradient", 1000, 0, 1000, 0, {}, true},
                                 {"far from element 0", far + 777, far + 2 * begin, far + 770, 0, {}, false, far}});
  }
  return shapes;
}

void compare_updates() {
  constexpr std::size_t s = kSuperblock;
  const Shape two{"two superblocks", s + 77, s - 64, s + 77}, second{"the second superblock", s + 500, s + 96, s + 500};
  for (const Rule rule : {Rule::adam, Rule::adagrad, Rule::lion, Rule::ademamix, Rule::sgd}) {
    for (const Format moments : {Format::fp32, Format::bf16, Format::int8}) {
      for (const Dtype grad : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
        for (const auto& [param, master] : {std::pair{Dtype::fp32, Master::none}, {Dtype::bf16, Master::fp32}, {Dtype::fp16, Master::fp32},
                                            {Dtype::bf16, Master::split}}) {
          for (const Step& step : kSteps) {
            if (few && &step >= kSteps + 2) break;
            for (const Shape& shape : shapes_of(moments)) compare_update(rule, {grad, param, master, moments}, shape, step);
          }
        }
      }
      for (const Shape& shape : {two, second}) {
        compare_update(rule, {Dtype::bf16, Dtype::bf16, Master::split, moments}, shape, kSteps[0]);
        compare_update(rule, {Dtype::fp32, Dtype::fp32, Master::none, moments}, shape, kSteps[0]);
      }
    }
  }
}

void compare_norm(Dtype dtype, std::size_t n, double carry, int kind) {
  ++seed;
  Random random(seed);
  const std::size_t width = bytes_of(dtype), shift = seed % 3 * width;
  std::vector<unsigned char> values(shift + n * width);
  for (std::size_t i = 0; i < n; ++i) {
    put(values.data() + shift + i * width, width, dtype == Dtype::fp16, value_of(i % 97 == 0 ? kind : static_cast<int>(i % 2), random));
  }
  std::vector<double> sums(norm_blocks(n) + 1, 7);
  double found = carry, expected;
  {
    const Caller caller;
    expected = squared_norm(values.data() + shift, dtype, n, carry, Isa::scalar, pool());
    squared_norm(values.data() + shift, dtype, n, sums.data(), &found, 0);
  }
  ++compared;
  if (std::memcmp(&found, &expected, sizeof found) == 0 && sums.back() == 7) return;
  if (++wrong < 40) std::printf("seed %u: norm of %zu values, dtype %d: %a instead of %a\n", seed, n, static_cast<int>(dtype), found, expected);
}

void compare_norms() {
  std::vector<std::size_t> sizes = {1, 7, 8, 9, 248, 249, 255, 256, 257, 511, 513, 16383, 16384, 16385, 40000};
  if (!few) sizes.insert(sizes.end(), {2, 31, 33, 247, 300, 1000, 50001, 8 * kNormBlock, 8 * kNormBlock + 1, 9 * kNormBlock + 253});
  for (const Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (const std::size_t n : sizes) {
      for (const double carry : {0.0, 0.1, 1e300, -std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        compare_norm(dtype, n, carry, kUsual);
      }
      for (const int kind : {kSubnormal, kWide, kPowers, kSpecial}) compare_norm(dtype, n, 0.5, kind);
    }
  }
  // More sums than there are threads to add them, or as many.
  for (const std::size_t blocks : {258, 256, 257, 513}) {
    compare_norm(Dtype::bf16, blocks * kNormBlock + 3, 0.1, kUsual);
    if (few) break;
  }
}

// Is every group of a chunk updated once that has more elements than a launch counts? Nothing of it is read.
struct Numbered {
  template <template <class> class RuleOf, Format format, Dtype grad, Master master>
  static constexpr const int* whole() {
    return &kWhole;
  }
  template <template <class> class RuleOf, Format format>
  static constexpr const int* any() {
    return &kAny;
  }
  static constexpr int kWhole = 0, kAny = 1;
};

void compare_cuts() {
  alignas(16) static unsigned char there[16];
  const Chunk chunk{there, Dtype::bf16, there, Dtype::fp32, nullptr, Master::none, there, there, Format::fp32, 0, 0};
  const std::size_t begin = 37, end = 2 * kMostElements + 1000;
  std::vector<std::pair<std::size_t, std::size_t>> stretches;
  cut<Family<const int, Numbered>>(Rule::adam, chunk, begin, end, Hyper{}, [&](const int* kernel, const Launch& launch) {
    if (kernel == &Numbered::kAny) {
      stretches.emplace_back(launch.first, launch.first + 1);
      stretches.emplace_back(launch.rest, launch.rest + launch.count - 1);
    } else {
      const auto before = reinterpret_cast<std::uintptr_t>(launch.chunk.param) - reinterpret_cast<std::uintptr_t>(chunk.param);
      const std::size_t first = before / (kGroup * sizeof(float)) + launch.first;
      stretches.emplace_back(first, first + launch.count);
      if ((launch.first + launch.count) * kGroup * sizeof(float) >> 32 != 0) ++wrong;
    }
  });
  std::sort(stretches.begin(), stretches.end());
  std::size_t next = begin / kGroup;
  for (const auto& [first, last] : stretches) {
    if (first < last && first == next) next = last;
  }
  ++compared;
  if (next == (end + kGroup - 1) / kGroup) return;
  ++wrong;
  std::printf("group %zu of a large chunk is updated twice or not at all\n", next);
}

}  // namespace

int main(int count, char** arguments) {
  on_cpu_set("devices", kDevice + 1);
  cudaSetDevice(kDevice);
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::size_t equals = argument.find('=');
    if (argument == "few") few = true;
    if (equals != std::string::npos) on_cpu_set(argument.substr(0, equals).c_str(), std::atol(argument.c_str() + equals + 1));
  }
  compare_updates();
  compare_norms();
  compare_cuts();
  const long all = (5 * 3 + 1) * (3 * 3 + 1) + 3 + 1;  // of 16 rules with formats those for 9 pairs of gradient and master, and for any
  std::printf("%ld comparisons, %ld wrong; %ld of %ld kernels in %ld launches\n", compared, wrong, on_cpu_kernels(), all, on_cpu_launches());
  return wrong == 0 && on_cpu_kernels() == all ? 0 : 1;
}
