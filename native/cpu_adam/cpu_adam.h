// Optimizer updates on the CPU: one family of rules over one family of state formats, written once (update.h) and compiled for
// plain scalars (the specification), AVX2, AVX-512 and NEON, which agree with it bit for bit.
//
// Every operation is an IEEE-754 single-precision operation, correctly rounded, in the order written in rules.h and moments.h;
// nothing is contracted to a fused multiply-add, so results do not depend on instruction set, thread count, chunking or address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::cpu_adam {

enum class Dtype { fp32, bf16, fp16 };
enum class Isa { scalar, neon, avx2, avx512 };  // each better than the one before, where the CPU has it
enum class Rule { adam, adagrad, lion, ademamix, sgd };

// Where the fp32 value of a parameter is kept between steps.
//   none   the parameter is fp32, and is the value itself
//   fp32   4 bytes beside a bf16 or fp16 parameter, which is written and never read
//   split  2 bytes beside a bf16 parameter: the bits that it lacks (update.h, [Note: split])
enum class Master { none, fp32, split };

// How moments are kept: 4, 2 or 1.125 bytes each; moments.h. The second one is never negative.
enum class Format { fp32, bf16, int8 };
enum class Moment { first, second };

constexpr std::size_t kGroup = 32;          // elements with one scale in int8; a kernel works on one group at a time
constexpr std::size_t kSuperblock = 32768;  // elements; int8: this many codes, then their scales
constexpr std::size_t kSuperblockBytes = kSuperblock + kSuperblock / kGroup * sizeof(float);

// Bytes of a block of moments. An int8 block is whole superblocks of 36864 bytes: nine pages.
std::size_t block_bytes(Format format, std::size_t elements);

// The hyper-parameters of one step, in double, as the caller has them; a rule ignores what is not its own.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;  // adagrad: lr after its decay
  double bias_correction1;                     // adam, ademamix: 1 - beta1^t
  double bias_correction2_sqrt;                // adam, ademamix: sqrt(1 - beta2^t)
  double grad_scale;                           // unscale * clip factor; multiplied into the gradient first
  bool decoupled;                              // adam: true: AdamW (decay of the parameter); false: Adam (added to the gradient)
  double momentum = 0, dampening = 0;          // sgd; without momentum there is no first moment
  bool nesterov = false, first_step = false;   // sgd; the first step's momentum is the gradient
  double beta3 = 0, alpha = 0;                 // ademamix: of the slow average
};

// The constants of the kernels. Each is computed in double and rounded to fp32 once. Rounding the hyper-parameters
// first would not do: 1 - 0.999f is 0.00100004673, and v would be off by 5e-5.
struct Constants {
  explicit Constants(const Hyper& h)
      : grad_scale(static_cast<float>(h.grad_scale)), weight_decay(static_cast<float>(h.weight_decay)),
        keep_weight(static_cast<float>(1 - h.lr * h.weight_decay)), beta1(static_cast<float>(h.beta1)),
        rest1(static_cast<float>(1 - h.beta1)), beta2(static_cast<float>(h.beta2)), rest2(static_cast<float>(1 - h.beta2)),
        correction2(static_cast<float>(h.bias_correction2_sqrt)), inverse2(1 / correction2), eps(static_cast<float>(h.eps)),
        step(static_cast<float>(h.lr / h.bias_correction1)), lr(static_cast<float>(h.lr)), momentum(static_cast<float>(h.momentum)),
        undamped(static_cast<float>(1 - h.dampening)), decay(h.weight_decay != 0), decoupled(h.decoupled), nesterov(h.nesterov),
        first_step(h.first_step), beta3(static_cast<float>(h.beta3)), rest3(static_cast<float>(1 - h.beta3)),
        alpha(static_cast<float>(h.alpha)), inverse1(static_cast<float>(1 / h.bias_correction1)) {}
  float grad_scale, weight_decay, keep_weight, beta1, rest1, beta2, rest2, correction2, inverse2, eps, step, lr, momentum, undamped;
  bool decay, decoupled, nesterov, first_step;
  float beta3, rest3, alpha, inverse1;
  std::uint32_t ordinary = 0;  // native/cuda: the bound of a Quick rule (octet.h)
};

// Addresses of one chunk of each block of a unit. All but int8 moments may lie at any multiple of their element size; streaming stores are
// used where `param` has the alignment for them. `grad` null: all zeros. `first`, `second`, `slow` null where the rule has none.
struct Chunk {
  const void* grad; Dtype grad_dtype;
  void* param; Dtype param_dtype;
  void* master; Master master_format;  // null for Master::none
  void* first; void* second; Format moments;
  std::uint64_t position;  // the number of the chunk's first element in the unit: what its noise is drawn for (noise.h)
  std::uint64_t key;       // noise.h
  void* slow = nullptr;    // ademamix: the slow average, kept as a first moment is
};

// The targets of an update, laid out like the chunk; null: in place. They are not read, and must not overlap with memory that is. They
// are written past the caches, so this moves no more bytes than an update in place.
struct Targets {
  void *param = nullptr, *master = nullptr, *first = nullptr, *second = nullptr, *slow = nullptr;
};

class Pool;  // worker threads; size fixed at construction, independent of OMP_NUM_THREADS

Isa best_isa();                 // what this CPU has
bool has_isa(Isa isa);

// Updates elements [begin, end) of the chunk; blocking. Throws std::invalid_argument, before anything is changed, when the CPU lacks
// `isa`, when formats do not go together, and for bf16 and int8 moments when `begin` or `position` is no multiple of kGroup.
// Nothing outside the range is written, except that an int8 group of which `end` is a part gets one new scale: the elements
// behind `end` must be padding (zeros) then.
void update(Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper, Isa isa, Pool& pool,
            const Targets& targets = {});

// Elements [begin, begin + n) of a block of moments to and from fp32. `encode` rounds to nearest, and for int8 writes whole groups:
// `begin` must be a multiple of kGroup, and the elements behind the n in the last group become zeros.
void decode(const void* block, Format format, Moment moment, float* values, std::size_t begin, std::size_t n);
void encode(void* block, Format format, Moment moment, const float* values, std::size_t begin, std::size_t n);

// A bf16 parameter and the 16 bits that it lacks to and from the fp32 master.
void join(const std::uint16_t* param, const std::int16_t* low, float* values, std::size_t n);
void split(const float* values, std::uint16_t* param, std::int16_t* low, std::size_t n);

// carry + sum over consecutive blocks of kNormBlock elements of (sum over 8 lanes, lane = index % 8 within the block, each lane added
// in index order in double; lanes then added in order 0..7), blocks added in order. A square of an fp32 is exact in double, so the
// result depends only on the values: not on instruction set, threads, or on how a buffer is cut into calls, when every call but the
// last has a multiple of kNormBlock elements. It is finite exactly when carry and all values are: no sum of squares of finite
// fp32 values overflows a double.
constexpr std::size_t kNormBlock = 16384;
double squared_norm(const void* values, Dtype dtype, std::size_t n, double carry, Isa isa, Pool& pool);

// target[i] = target[i] + source[i], added in fp32 and rounded to nearest with ties to EVEN, in bf16 too: it is what torch's add does, and
// not how a parameter is rounded (update.h, [Note: split]). NaN is the one of convert.h. Either address may be any multiple of the element
// size. The two do not overlap, or are one.
void add(void* target, const void* source, Dtype dtype, std::size_t n, Isa isa, Pool& pool);

// Copies n bytes that do not overlap.
void copy(void* target, const void* source, std::size_t n, Pool& pool);

// a = 0.9 a + b, c = 0.9 c + b: the plain loop beside which an update is judged, with the same threads and cuts (20 bytes an element).
void in_place_update(float* a, const float* b, float* c, std::size_t n, Pool& pool);

// to_a = 0.9 a + b, to_c = 0.9 c + b: the loop beside which an update to another place is judged. It writes past the caches where both
// targets lie at whole cache lines (20 bytes an element).
void shadow_update(const float* a, const float* b, const float* c, float* to_a, float* to_c, std::size_t n, Pool& pool);

}  // namespace infinity::cpu_adam
