// The loop beside which an update is judged, as a compiler writes it for this CPU; its figures are bytes, so it may use what it likes.
#include "cpu_adam.h"
#include "pool.h"

namespace infinity::cpu_adam {
namespace {

#if defined(__x86_64__)
#define INFINITY_FOR_THIS_CPU __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define INFINITY_FOR_THIS_CPU
#endif

INFINITY_FOR_THIS_CPU
void plain_loop(float* __restrict a, const float* __restrict b, float* __restrict c, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    a[i] = a[i] * 0.9f + b[i];
    c[i] = c[i] * 0.9f + b[i];
  }
}

}  // namespace

void in_place_update(float* a, const float* b, float* c, std::size_t n, Pool& pool) {
  pool.run(n, 64, [&](std::size_t begin, std::size_t end) { plain_loop(a + begin, b + begin, c + begin, end - begin); });
}

}  // namespace infinity::cpu_adam
