#include "engine.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

namespace infinity::aio {

namespace {

constexpr std::uint64_t floor_block(std::uint64_t position) { return position & ~std::uint64_t{kAlignment - 1}; }
constexpr std::uint64_t ceil_block(std::uint64_t position) { return floor_block(position + kAlignment - 1); }
bool aligned(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory) % kAlignment == 0; }

constexpr std::uint64_t kLargestFile = floor_block(std::numeric_limits<std::int64_t>::max());

// Enough to keep a device busy with unaligned requests; at 1 MiB each they cost 8 MiB, and only once touched.
constexpr std::size_t kBounceBuffers = 8;

// The throttle may catch up on wake-ups this late, so that the rate is met and not only bounded.
constexpr std::chrono::milliseconds kThrottleSlack{2};

void check(const Options& options) {
  if (options.depth < 1 || options.depth > 4096) throw std::invalid_argument("depth must be 1 to 4096");
  if (options.threads < 1 || options.threads > 256) throw std::invalid_argument("threads must be 1 to 256");
  if (options.request_bytes == 0 || options.request_bytes % kAlignment || options.request_bytes > (64u << 20))
    throw std::invalid_argument("request_bytes must be a multiple of 4096, at most 64 MiB");
}

}  // namespace

// Guarded by the engine's mutex.
struct FaultPlan {
  explicit FaultPlan(const Faults& faults) : faults(faults), random(faults.seed) {}

  void apply(Request& request) {
    const std::size_t blocks = (request.remaining() + kAlignment - 1) / kAlignment;
    if (blocks > 1 && std::uniform_real_distribution<>()(random) < faults.short_fraction)
      request.limit = kAlignment * (1 + random() % (blocks - 1));
    const bool reading = request.operation() == Operation::read;
    if ((reading ? reads++ : writes++) == (reading ? faults.fail_read_at : faults.fail_write_at))
      request.injected = faults.fail_errno;
    if (faults.bytes_per_second > 0) {
      const std::chrono::duration<double> cost(static_cast<double>(request.limit) / faults.bytes_per_second);
      free_at = std::max(free_at, Clock::now() - kThrottleSlack) + std::chrono::duration_cast<Clock::duration>(cost);
      request.due = free_at;
    }
  }

  const Faults faults;
  std::int64_t reads = 0, writes = 0;
  std::mt19937_64 random;
  Clock::time_point free_at;
};

// ---- Transfer and Ticket ----

Transfer::Transfer(Operation operation, const File& file, std::uint64_t offset, void* memory, std::size_t bytes,
                   std::shared_ptr<FaultPlan> faults)
    : operation(operation), descriptor(file.descriptor()), direct(file.direct()), offset(offset), end(offset + bytes),
      memory(static_cast<char*>(memory)), faults(std::move(faults)), cursor(offset), done_until_(end) {}

void Transfer::fail(std::uint64_t position, int code) {
  if (error_ != 0 && position >= done_until_) return;
  done_until_ = position;
  error_ = code;
}

void Transfer::finish() {
  // Notifying under the lock: the waiter may drop the last reference as soon as it can run.
  std::lock_guard<std::mutex> lock(mutex_);
  finished_.store(true, std::memory_order_release);
  wakeup_.notify_all();
}

Result Transfer::wait() {
  if (!finished()) {
    std::unique_lock<std::mutex> lock(mutex_);
    wakeup_.wait(lock, [this] { return finished(); });
  }
  return {error_, end - offset, done_bytes()};
}

bool Ticket::done() const { return !state_ || state_->finished(); }
Result Ticket::wait() const { return state_ ? state_->wait() : Result{}; }

// ---- Request ----

void Request::assign(std::shared_ptr<Transfer> of, std::uint64_t to, char* buffer) {
  transfer = std::move(of);
  bounce = buffer;
  begin = transfer->cursor;
  end = to;
  device_begin_ = bounce ? floor_block(begin) : begin;
  device_end_ = bounce ? ceil_block(end) : end;
  reached_ = device_begin_;
  filling_ = transfer->operation == Operation::write && (device_begin_ != begin || device_end_ != end);
}

// O_DIRECT can only go on from a block boundary, so a transfer that stopped inside a block repeats that block.
std::uint64_t Request::start() const { return transfer->direct ? floor_block(reached_) : reached_; }

Call Request::call() {
  if (bounce && operation() == Operation::write && reached_ == device_begin_)
    std::memcpy(bounce + (begin - device_begin_), transfer->memory_at(begin), end - begin);
  char* base = bounce ? bounce : transfer->memory_at(begin);
  return {operation(), transfer->descriptor->number, start(), base + (start() - device_begin_), limit};
}

Progress Request::advance(int result) {
  if (result == -EINTR || result == -EAGAIN) return Progress::again;

  // A read needs the caller's bytes only: the file may end inside the last block.
  const std::uint64_t goal = operation() == Operation::read && !filling_ ? end : device_end_;
  const std::uint64_t now = start() + static_cast<std::uint64_t>(std::max(result, 0));
  const bool stuck = now <= reached_;
  reached_ = std::max(reached_, now);
  error = 0;
  if (result < 0) {
    error = -result;
  } else if (reached_ < goal) {
    if (!stuck) return Progress::again;
    if (filling_) {
      std::memset(bounce + (reached_ - device_begin_), 0, device_end_ - reached_);
    } else {
      error = operation() == Operation::read ? kEndOfFile : EIO;  // a write of 0 bytes names no reason
    }
  }
  if (filling_ && !error) {
    filling_ = false;
    reached_ = device_begin_;
    return Progress::write_back;
  }

  done_until = filling_ ? begin : std::clamp(reached_, begin, end);
  if (bounce && operation() == Operation::read && done_until > begin)
    std::memcpy(transfer->memory_at(begin), bounce + (begin - device_begin_), done_until - begin);
  return Progress::finished;
}

// ---- QueueEngine ----

QueueEngine::QueueEngine(const Options& options)
    : options_((check(options), options)), slots_(options.depth), bounce_memory_(nullptr, std::free) {
  free_.reserve(options.depth);
  ready_.reserve(options.depth);
  for (Request& slot : slots_) free_.push_back(&slot);
  bounce_memory_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, kBounceBuffers * options.request_bytes)));
  if (!bounce_memory_) throw std::bad_alloc();
  for (std::size_t i = 0; i < kBounceBuffers; ++i)
    bounce_free_.push_back(bounce_memory_.get() + i * options.request_bytes);
}

Ticket QueueEngine::submit(Operation operation, File& file, std::uint64_t offset, void* memory, std::size_t bytes) {
  if (offset > kLargestFile || bytes > kLargestFile - offset)
    throw std::invalid_argument("offset + bytes is past the largest file");
  if (!memory && bytes != 0) throw std::invalid_argument("the memory is null");
  std::unique_lock<std::mutex> lock(mutex_);
  room_.wait(lock, [this] { return queue_.size() < options_.depth; });
  auto transfer = std::make_shared<Transfer>(operation, file, offset, memory, bytes, faults_);
  if (bytes == 0) {
    transfer->finish();
  } else {
    queue_.push_back(transfer);
    ++outstanding_;
    wake();
  }
  return Ticket(std::move(transfer));
}

Counters QueueEngine::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

void QueueEngine::set_faults(const Faults& faults) {
  if (!(faults.short_fraction >= 0 && faults.short_fraction <= 1))
    throw std::invalid_argument("short_fraction must be 0 to 1");
  if (!(faults.bytes_per_second >= 0)) throw std::invalid_argument("bytes_per_second must not be negative");
  if (faults.fail_errno <= 0) throw std::invalid_argument("fail_errno must be positive");
  const bool any = faults.short_fraction > 0 || faults.fail_read_at >= 0 || faults.fail_write_at >= 0 ||
                   faults.bytes_per_second > 0;
  auto plan = any ? std::make_shared<FaultPlan>(faults) : nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  faults_ = std::move(plan);
}

void QueueEngine::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return outstanding_ == 0; });
}

void QueueEngine::stop() {
  drain();
  std::lock_guard<std::mutex> lock(mutex_);
  stopping_ = true;
  wake();
}

Request* QueueEngine::next(Clock::time_point* not_before) {
  while (!ready_.empty() || cut()) {
    Request* request = ready_.back();
    if (request->due > Clock::now()) {
      *not_before = std::min(*not_before, request->due);
      return nullptr;
    }
    ready_.pop_back();
    if (request->injected == 0) return request;
    settle(request, request->advance(-request->injected));
  }
  return nullptr;
}

// Moves the next piece of the front transfer into a free slot. False: there is no work, no slot or no buffer.
bool QueueEngine::cut() {
  if (queue_.empty() || free_.empty()) return false;
  const std::shared_ptr<Transfer>& transfer = queue_.front();
  const std::uint64_t from = transfer->cursor;
  std::uint64_t to = std::min<std::uint64_t>(transfer->end, from + options_.request_bytes);
  bool bounced = false;
  if (transfer->direct) {
    // A partial block is a piece of its own: then a read-modify-write is one block, and the rest is whole blocks.
    const std::uint64_t block_end = floor_block(from) + kAlignment;
    const bool partial = from != floor_block(from) || to < block_end;
    to = partial ? std::min(transfer->end, block_end) : floor_block(to);
    bounced = partial || !aligned(transfer->memory_at(from));
  }
  char* buffer = nullptr;
  if (bounced) {
    if (bounce_free_.empty()) return false;
    buffer = bounce_free_.back();
    bounce_free_.pop_back();
    counters_.bounced_bytes += to - from;
  }
  Request* request = free_.back();
  free_.pop_back();
  request->assign(transfer, to, buffer);
  transfer->cursor = to;
  ++transfer->in_flight;
  if (to == transfer->end) {
    queue_.pop_front();
    room_.notify_one();
  }
  make_ready(request);
  return true;
}

void QueueEngine::make_ready(Request* request) {
  request->limit = request->remaining();
  request->injected = 0;
  request->due = {};
  if (FaultPlan* faults = request->transfer->faults.get()) faults->apply(*request);
  ++counters_.device_requests;
  ready_.push_back(request);
}

void QueueEngine::complete(Request* request, int result) {
  const Progress progress = request->advance(result);  // may copy a whole request, so before the lock
  std::lock_guard<std::mutex> lock(mutex_);
  settle(request, progress);
}

void QueueEngine::settle(Request* request, Progress progress) {
  if (progress != Progress::finished) {
    if (progress == Progress::again) ++counters_.continued;
    return make_ready(request);
  }
  const std::shared_ptr<Transfer> transfer = std::move(request->transfer);
  if (request->bounce) bounce_free_.push_back(request->bounce);
  free_.push_back(request);
  if (request->error != 0) transfer->fail(request->done_until, request->error);
  --transfer->in_flight;
  if (transfer->failed() && !queue_.empty() && queue_.front() == transfer) {
    queue_.pop_front();  // what is left of a failed transfer is not started
    room_.notify_one();
  }
  if (!transfer->settled()) return;
  (transfer->operation == Operation::read ? counters_.bytes_read : counters_.bytes_written) += transfer->done_bytes();
  transfer->finish();
  if (--outstanding_ == 0) idle_.notify_all();
}

}  // namespace infinity::aio
