// The threads of a block as fibers of one thread of the CPU. One runs until it has to wait for others, at an exchange or a barrier. What
// CUDA leaves undefined ends the process with a message.
//
// Compiled without sanitizers, which know one stack for each thread; the thread sanitizer is told which fiber runs, and what orders memory:
// barriers (__syncwarp is one, a shuffle is none) and the beginning and end of a grid, and not the switches between fibers. So it reports
// races between threads of a block, and between those of neighbouring blocks, although nothing runs at the same time.
#include "threads.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <vector>

#include "cuda_runtime.h"

extern "C" {  // of the thread sanitizer
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* at);
__attribute__((weak)) void __tsan_release(void* at);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char* file, int line);
}

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {
namespace {

constexpr unsigned kWarp = 32, kThreads = 1024;
constexpr std::size_t kStack = 256 << 10, kSharedBytes = 48 << 10;

void acquire(char& at) {
  if (__tsan_acquire) __tsan_acquire(&at);
}
void release(char& at) {
  if (__tsan_release) __tsan_release(&at);
}

// What the machine does with the memory of kernels is no access of a thread to the thread sanitizer.
struct Unseen {
  Unseen() {
    if (AnnotateIgnoreWritesBegin) AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    if (AnnotateIgnoreWritesEnd) AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  }
};

// A place to go on at. ucontext begins on a stack of its own, and the builtins, which make no call of the system, go on from there.
using Place = void*[5];
[[gnu::noinline]] void go_on(Place& to) { __builtin_longjmp(to, 1); }
[[gnu::noinline]] void change(Place& from, Place& to) {
  if (__builtin_setjmp(from) == 0) go_on(to);
}

enum class State { ready, exchanges, at_barrier, returned };

struct Fiber {
  Place place;
  char* stack = nullptr;
  void* sanitizer = nullptr;
  unsigned number = 0;
  State state = State::returned;
  Exchange what = Exchange::shfl;  // it waits at, or a barrier
  int line = 0;
  unsigned mask = 0, from = 0;
  std::uint64_t brought = 0, got = 0;
};

// Neighbouring blocks have fibers of their own, or the thread sanitizer would take both for one thread.
struct Machine {
  std::mutex mutex;
  std::vector<Fiber> fibers[2] = {std::vector<Fiber>(kThreads), std::vector<Fiber>(kThreads)};
  Fiber* block = nullptr;
  Fiber* current = nullptr;
  const std::function<void()>* body = nullptr;
  Place host;
  void* host_sanitizer = nullptr;
  struct {
    int line;
    void* memory;
  } shared[8] = {};
  std::size_t shared_bytes = 0;
  unsigned barriers = 0, exchanges[kThreads / kWarp] = {};
  char begun = 0, ended = 0, at_barrier[2] = {}, at_exchange[kThreads / kWarp][2] = {};  // addresses for the thread sanitizer
};

Machine& machine() {
  static auto* const it = new Machine;
  return *it;
}

std::string where(const Fiber& fiber) {
  static const char* const names[] = {"__shfl_sync", "__shfl_xor_sync", "__syncwarp"};
  const std::string thread = "thread " + std::to_string(fiber.number);
  if (fiber.state == State::ready) return thread + " runs";
  if (fiber.state == State::returned) return thread + " has returned";
  const char* const what = fiber.state == State::at_barrier ? "__syncthreads" : names[static_cast<int>(fiber.what)];
  return thread + " waits at " + what + " of line " + std::to_string(fiber.line);
}

[[noreturn]] void disagree(const Fiber& one, const Fiber& other) {
  give_up("block " + std::to_string(blockIdx.x) + ": " + where(one) + ", and " + where(other));
}

void to_host() {
  Machine& m = machine();
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(m.host_sanitizer, 1);
  change(m.current->place, m.host);
}

// A fiber runs its thread in one block after the other.
void live() {
  Machine& m = machine();
  while (true) {
    acquire(m.begun);
    (*m.body)();
    release(m.ended);
    Fiber& me = *m.current;
    me.state = State::returned;
    const Fiber* const lanes = m.block + me.number / kWarp * kWarp;  // those that wait for this one wait for good
    for (const Fiber* other = lanes; other < lanes + kWarp; ++other) {
      if (other->state == State::at_barrier || (other->state == State::exchanges && other->mask >> me.number % kWarp & 1)) disagree(*other, me);
    }
    to_host();
  }
}

void begin(Fiber& fiber) {
  void* const memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) give_up("no memory for a stack");
  mprotect(memory, 4096, PROT_NONE);
  fiber.stack = static_cast<char*>(memory);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, live, 0);
  setcontext(&context);
}

[[gnu::noinline]] void resume(Fiber& fiber) {
  Machine& m = machine();
  m.current = &fiber;
  threadIdx = dim3(fiber.number);
  threadIdx.y = threadIdx.z = 0;
  if (__tsan_create_fiber && !fiber.sanitizer) fiber.sanitizer = __tsan_create_fiber(0);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber.sanitizer, 1);
  if (fiber.stack) {
    change(m.host, fiber.place);
  } else if (__builtin_setjmp(m.host) == 0) {
    begin(fiber);
  }
}

void run_block(unsigned number, long order, std::mt19937& random) {
  Machine& m = machine();
  blockIdx = dim3(number);
  m.block = m.fibers[number % 2].data();
  std::vector<unsigned> turns;
  for (unsigned k = 0; k < blockDim.x; ++k) {
    m.block[k].number = k;
    m.block[k].state = State::ready;
    turns.push_back(order == 1 ? blockDim.x - 1 - k : k);
  }
  const auto there_is = [&](State state) {
    return std::any_of(m.block, m.block + blockDim.x, [state](const Fiber& fiber) { return fiber.state == state; });
  };
  while (there_is(State::ready)) {
    if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
    for (const unsigned k : turns) {
      if (m.block[k].state == State::ready) resume(m.block[k]);
    }
  }
  if (there_is(State::exchanges) || there_is(State::at_barrier)) give_up("block " + std::to_string(number) + ": no thread can go on");
  const Unseen unseen;
  for (auto& [line, memory] : m.shared) {
    std::free(memory);
    memory = nullptr;
  }
  m.shared_bytes = 0;
}

}  // namespace

void give_up(const std::string& why) {
  std::fflush(stdout);
  std::fprintf(stderr, "CUDA on the CPU: %s\n", why.c_str());
  std::_Exit(99);
}

void run_grid(unsigned blocks, unsigned threads, long order, const std::function<void()>& body) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  std::fenv_t environment;  // a kernel rounds as the device does
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  std::mt19937 random(static_cast<unsigned>(order));
  m.body = &body;
  if (__tsan_get_current_fiber) m.host_sanitizer = __tsan_get_current_fiber();
  blockDim = dim3(threads);
  gridDim = dim3(blocks);
  release(m.begun);
  for (unsigned block = 0; block < blocks; ++block) run_block(block, order, random);
  acquire(m.ended);
  std::fesetenv(&environment);
}

std::uint64_t exchange(Exchange what, unsigned mask, std::uint64_t mine, unsigned from, int line) {
  Machine& m = machine();
  Fiber& me = *m.current;
  const unsigned warp = me.number / kWarp;
  Fiber* const lanes = m.block + warp * kWarp;
  me.state = State::exchanges, me.what = what, me.line = line, me.mask = mask, me.from = from, me.brought = mine;
  if (!(mask >> me.number % kWarp & 1)) give_up(where(me) + " and is not in its own mask");
  if (!(mask >> from & 1)) give_up(where(me) + " for lane " + std::to_string(from) + ", which is not in the mask");
  char& order = m.at_exchange[warp][m.exchanges[warp] % 2];
  if (what == Exchange::syncwarp) release(order);
  bool all = true;
  for (unsigned k = 0; k < kWarp; ++k) {
    if (!(mask >> k & 1)) continue;
    if (lanes[k].state == State::ready) {
      all = false;
    } else if (lanes[k].state != State::exchanges || lanes[k].mask != mask || lanes[k].line != line || lanes[k].what != what) {
      disagree(me, lanes[k]);
    }
  }
  if (all) {
    ++m.exchanges[warp];
    for (unsigned k = 0; k < kWarp; ++k) {
      if (mask >> k & 1) lanes[k].got = lanes[lanes[k].from].brought, lanes[k].state = State::ready;
    }
  } else {
    to_host();
  }
  if (what == Exchange::syncwarp) acquire(order);
  return me.got;
}

void sync_threads(int line) {
  Machine& m = machine();
  Fiber& me = *m.current;
  me.state = State::at_barrier, me.line = line;
  char& order = m.at_barrier[m.barriers % 2];
  release(order);
  bool all = true;
  for (unsigned k = 0; k < blockDim.x; ++k) {
    const Fiber& other = m.block[k];
    all = all && other.state == State::at_barrier;
    if (other.state == State::returned || (other.state == State::at_barrier && other.line != line)) disagree(me, other);
  }
  if (all) {
    ++m.barriers;
    for (unsigned k = 0; k < blockDim.x; ++k) m.block[k].state = State::ready;
  } else {
    to_host();
  }
  acquire(order);
}

void* shared_memory(int line, std::size_t bytes) {
  Machine& m = machine();
  auto* known = m.shared;
  while (known->memory && known->line != line) {
    if (++known == std::end(m.shared)) give_up("too many names of shared memory");
  }
  if (known->memory) return known->memory;
  if ((m.shared_bytes += bytes) > kSharedBytes) give_up("more than 48 KiB of shared memory");
  const Unseen unseen;
  *known = {line, std::malloc(bytes)};
  std::memset(known->memory, 0xfe, bytes);  // neither zeros nor NaN
  return known->memory;
}

}  // namespace on_cpu
