// Do the lanes of the CUDA kernel add a norm block up as the scalar specification does, whatever its length and type?
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_adam.h"
#include "pool.h"

#include "../../../native/cuda/norm.h"

using namespace infinity;
using cpu_adam::Dtype;

namespace {

// The kernel's sum, with loops in the place of threads.
template <class T, class Widen>
double norm(const std::vector<T>& values, double carry, Widen widen) {
  for (std::size_t begin = 0; begin < values.size(); begin += cpu_adam::kNormBlock) {
    const std::size_t end = std::min(begin + cpu_adam::kNormBlock, values.size());
    double sum = 0;
    for (unsigned lane = 0; lane < cuda::kLanes; ++lane) sum = sum + cuda::lane_sum(values.data(), begin, end, lane, widen);
    carry = carry + sum;
  }
  return carry;
}

template <class T, class Widen>
bool agree(Dtype dtype, std::size_t n, cpu_adam::Pool& pool, Widen widen) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<T> values(n);
  for (T& value : values) {
    const std::uint32_t bits = (random() & 0xbfffffff) ^ (random() % 8 << 22);  // finite
    std::memcpy(&value, reinterpret_cast<const char*>(&bits) + 4 - sizeof(T), sizeof(T));
  }
  const double expected = cpu_adam::squared_norm(values.data(), dtype, n, 0.1, cpu_adam::Isa::scalar, pool);
  const double sum = norm(values, 0.1, widen);
  if (std::memcmp(&sum, &expected, sizeof sum) == 0) return true;
  std::printf("dtype %d, %zu values: %a, expected %a\n", static_cast<int>(dtype), n, sum, expected);
  return false;
}

}  // namespace

int main() {
  cpu_adam::Pool pool(1);
  bool well = true;
  for (const std::size_t n : {0, 1, 7, 8, 9, 248, 249, 255, 256, 257, 300, 511, 513, 16384, 16385, 40000, 50001}) {
    well &= agree<float>(Dtype::fp32, n, pool, [](float x) { return x; });
    well &= agree<std::uint16_t>(Dtype::bf16, n, pool, [](std::uint16_t x) { return cpu_adam::from_bf16(x); });
    well &= agree<std::uint16_t>(Dtype::fp16, n, pool, [](std::uint16_t x) { return cpu_adam::from_fp16(x); });
  }
  return well ? 0 : 1;
}
