#include "engine.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "faults.h"

namespace infinity::aio {

namespace {

constexpr std::uint64_t floor_block(std::uint64_t position) { return position & ~std::uint64_t{kAlignment - 1}; }
constexpr std::uint64_t ceil_block(std::uint64_t position) { return floor_block(position + kAlignment - 1); }
bool aligned(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory) % kAlignment == 0; }

constexpr std::uint64_t kLargestFile = floor_block(std::numeric_limits<std::int64_t>::max());

// Requests that are copied have these sizes at most. One copy is then short beside what is in flight, and there are enough
// buffers to keep the device busy while others are being copied; together they cost 20 MiB, and only once used.
struct Pool {
  std::size_t bytes, count;
};
constexpr Pool kBouncePools[] = {{64u << 10, 64}, {1u << 20, 16}};

// Below, the pages of a request are too few for the copy to pay; see [Note: ordinary memory].
constexpr std::size_t kCopyFrom = 32u << 10;

// The bytes in flight: enough for full speed, and the most that a demand read waits for.
constexpr std::size_t kWindow = 32u << 20;

// So many foreground requests may pass a waiting background transfer.
constexpr unsigned kPassOver = 31;

// Repetitions without progress come at once at first, then later and later, up to 6.4 ms.
constexpr unsigned kPromptTries = 8;
constexpr std::chrono::microseconds kPause{50};

// Completions that are taken under one lock.
constexpr std::size_t kPerLock = 64;

bool later(const Request* a, const Request* b) { return a->due > b->due; }

void check(const Options& options) {
  if (options.depth < 1 || options.depth > 4096) throw std::invalid_argument("depth must be 1 to 4096");
  if (options.threads < 1 || options.threads > 256) throw std::invalid_argument("threads must be 1 to 256");
  if (options.request_bytes == 0 || options.request_bytes % kAlignment || options.request_bytes > (64u << 20))
    throw std::invalid_argument("request_bytes must be a multiple of 4096, at most 64 MiB");
}

}  // namespace

// ---- Transfer and Ticket ----

Transfer::Transfer(Operation operation, const File& file, std::vector<Part> parts, Priority priority,
                   std::shared_ptr<FaultPlan> faults)
    : operation(operation), priority(priority), descriptor(file.descriptor()), direct(file.direct()),
      faults(std::move(faults)), parts_(std::move(parts)) {
  for (const Part& part : parts_) asked_ += part.bytes;
  done_ = asked_;
  skip_empty_parts();
}

void Transfer::skip_empty_parts() {
  while (!all_cut() && part().bytes == 0) ++index_;
  if (!all_cut()) cursor_ = part().offset;
}

void Transfer::cut_until(std::uint64_t position) {
  cursor_ = position;
  if (cursor_ < part().offset + part().bytes) return;
  before_ += part().bytes;
  ++index_;
  skip_empty_parts();
}

void Transfer::fail(std::uint64_t mark, int code) {
  if (error_ != 0 && mark >= done_) return;
  done_ = mark;
  error_ = code;
}

void Transfer::finish() {
  descriptor.reset();  // before any thread sees the end, so that no file stays open that its caller has closed
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
  return {error_, asked_, done_};
}

bool Ticket::done() const { return !state_ || state_->finished(); }
Result Ticket::wait() const { return state_ ? state_->wait() : Result{}; }

// ---- Request ----

void Request::assign(std::shared_ptr<Transfer> of, std::uint64_t to, char* buffer) {
  transfer = std::move(of);
  priority = transfer->priority;
  bounce = buffer;
  begin = transfer->cursor();
  end = to;
  mark = transfer->mark();
  memory_ = static_cast<char*>(transfer->part().memory) + (begin - transfer->part().offset);
  device_begin_ = bounce ? floor_block(begin) : begin;
  device_end_ = bounce ? ceil_block(end) : end;
  reached_ = device_begin_;
  tries = 0;
  filling_ = transfer->operation == Operation::write && (device_begin_ != begin || device_end_ != end);
}

// O_DIRECT can only continue from a block boundary, so a transfer that stopped inside a block repeats that block.
std::uint64_t Request::start() const { return transfer->direct ? floor_block(reached_) : reached_; }

void Request::prepare() {
  bytes = most_ = remaining();
  injected = 0;
  fixed = false;
  due = {};
  late = false;
  if (tries > kPromptTries) {
    due = Clock::now() + kPause * (1 << std::min(tries - kPromptTries, 7u));
    late = true;
  }
}

void Request::shorten(std::size_t moved) {
  most_ = moved;
  bytes = transfer->direct ? ceil_block(moved) : moved;
}

Call Request::call() {
  if (bounce && operation() == Operation::write && reached_ == device_begin_)
    std::memcpy(bounce + (begin - device_begin_), memory_, end - begin);
  char* base = bounce ? bounce : memory_;
  return {operation(), transfer->descriptor->number, start(), base + (start() - device_begin_), bytes, transfer->direct};
}

// Where a failure leaves the caller's bytes. Of a block that was written in part nothing counts, even when what is missing is
// none of theirs: an error never goes with all bytes done.
std::uint64_t Request::certain() const {
  if (filling_) return begin;
  return std::clamp(operation() == Operation::read ? reached_ : start(), begin, end);
}

bool Request::no_progress() { return ++tries < kTries; }

Progress Request::advance(int result) {
  if ((result == -EINTR || result == -EAGAIN) && no_progress()) return Progress::again;

  // A read needs the caller's bytes only: the file may end inside the last block.
  const std::uint64_t goal = operation() == Operation::read && !filling_ ? end : device_end_;
  const std::uint64_t now = start() + std::min(static_cast<std::size_t>(std::max(result, 0)), most_);
  const bool stuck = now <= reached_;
  reached_ = std::max(reached_, now);
  error = 0;
  if (result < 0) {
    error = -result;
  } else if (reached_ < goal) {
    if (!stuck) {
      tries = 0;
      return Progress::again;
    }
    const bool ended = operation() == Operation::read && transfer->descriptor->ends_at(reached_);
    if (!ended && no_progress()) return Progress::again;
    if (filling_ && ended) {
      std::memset(bounce + (reached_ - device_begin_), 0, device_end_ - reached_);
    } else {
      error = operation() == Operation::read ? kEndOfFile : EIO;  // a write of 0 bytes names no reason
    }
  }
  if (filling_ && !error) {
    filling_ = false;
    reached_ = device_begin_;
    tries = 0;
    return Progress::write_back;
  }

  done_until = certain();
  if (bounce && operation() == Operation::read && done_until > begin)
    std::memcpy(memory_, bounce + (begin - device_begin_), done_until - begin);
  return Progress::finished;
}

void Request::give_up(int code) {
  error = code;
  done_until = bounce && operation() == Operation::read ? begin : certain();
}

// ---- QueueEngine ----

QueueEngine::QueueEngine(const Options& options)
    : options_((check(options), options)), slots_(options.depth),
      window_(std::max(kWindow, 4 * options.request_bytes)),
      bounce_memory_(kBouncePools[0].bytes * kBouncePools[0].count + kBouncePools[1].bytes * kBouncePools[1].count) {
  free_.reserve(options.depth);
  ready_.reserve(options.depth);
  late_.reserve(options.depth);
  for (Request& slot : slots_) free_.push_back(&slot);
  char* buffer = bounce_memory_.data();
  for (int pool : {0, 1})
    for (std::size_t i = 0; i < kBouncePools[pool].count; ++i, buffer += kBouncePools[pool].bytes)
      bounce_free_[pool].push_back(buffer);
}

Ticket QueueEngine::submit(Operation operation, File& file, std::uint64_t offset, void* memory, std::size_t bytes,
                           Priority priority) {
  return submit(operation, file, std::vector<Part>{{offset, memory, bytes}}, priority);
}

Ticket QueueEngine::submit(Operation operation, File& file, std::vector<Part> parts, Priority priority) {
  std::uint64_t all = 0;
  for (const Part& part : parts) {
    if (part.offset > kLargestFile || part.bytes > kLargestFile - part.offset)
      throw std::invalid_argument("offset + bytes is past the largest file");
    if (!part.memory && part.bytes != 0) throw std::invalid_argument("the memory is null");
    admit(operation, file, part);
    all += part.bytes;
    if (all > kLargestFile) throw std::invalid_argument("the parts together are larger than the largest file");
  }
  Queue& queue = this->queue(priority);
  std::unique_lock<std::mutex> lock(mutex_);
  queue.room.wait(lock, [&] { return queue.transfers.size() < options_.depth || dead_; });
  auto transfer = std::make_shared<Transfer>(operation, file, std::move(parts), priority, faults_);
  if (transfer->all_cut()) {
    transfer->finish();
  } else if (dead_) {
    transfer->fail(0, dead_);
    transfer->finish();
  } else {
    queue.transfers.push_back(transfer);
    ++outstanding_;
    // Behind others that wait for room: what makes room looks at the queue again.
    if (queue.transfers.size() == 1) wake();
  }
  return Ticket(std::move(transfer));
}

bool QueueEngine::Queue::remove(const std::shared_ptr<Transfer>& transfer) {
  const auto found = std::find(transfers.begin(), transfers.end(), transfer);
  if (found == transfers.end()) return false;
  transfers.erase(found);
  room.notify_one();
  return true;
}

void QueueEngine::promote(const Ticket& ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!queue(Priority::background).remove(ticket.state_)) return;
  ticket.state_->priority = Priority::foreground;
  queue(Priority::foreground).transfers.push_back(ticket.state_);
  wake();
}

Counters QueueEngine::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

void QueueEngine::set_faults(const Faults& faults) {
  check(faults);
  auto plan = std::make_shared<FaultPlan>(faults);
  std::lock_guard<std::mutex> lock(mutex_);
  faults_ = std::move(plan);
}

int QueueEngine::ring_fault() { return faults_ ? faults_->ring_call() : 0; }

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

bool QueueEngine::has_work() const {
  return !ready_.empty() || !queues_[0].transfers.empty() || !queues_[1].transfers.empty();
}

Request* QueueEngine::next(Clock::time_point* not_before) {
  for (;;) {
    Request* request;
    if (!late_.empty() && late_.front()->due <= Clock::now()) {
      std::pop_heap(late_.begin(), late_.end(), later);
      request = late_.back();
      late_.pop_back();
    } else if (!ready_.empty()) {
      request = ready_.back();
      if (request->due != Clock::time_point{} && request->due > Clock::now()) {
        *not_before = std::min(*not_before, request->due);
        break;
      }
      ready_.pop_back();
    } else if (cut()) {
      continue;
    } else {
      break;
    }
    if (request->injected == 0) return request;
    settle(request, request->advance(-request->injected));
  }
  if (!late_.empty()) *not_before = std::min(*not_before, late_.front()->due);
  return nullptr;
}

bool QueueEngine::cut() {
  if (free_.empty()) return false;
  const bool turn = passed_over_ >= kPassOver || queue(Priority::foreground).transfers.empty();
  if (turn && cut(Priority::background)) {
    passed_over_ = 0;
    return true;
  }
  if (!cut(Priority::foreground)) return false;
  if (!queue(Priority::background).transfers.empty()) ++passed_over_;
  return true;
}

// Moves the next piece of the queue's front transfer into a free slot. False: there is no work, or no room for it.
bool QueueEngine::cut(Priority priority) {
  Queue& queue = this->queue(priority);
  const bool background = priority == Priority::background;
  if (queue.transfers.empty() || (background && queue.slots >= std::max(1u, options_.depth / 2))) return false;
  const std::shared_ptr<Transfer>& transfer = queue.transfers.front();
  const Part& part = transfer->part();
  const std::uint64_t from = transfer->cursor(), last = part.offset + part.bytes;
  std::uint64_t to = std::min<std::uint64_t>(last, from + options_.request_bytes);
  const char* memory = static_cast<const char*>(part.memory) + (from - part.offset);
  bool bounced = false;
  if (transfer->direct) {
    // A partial block is a piece of its own: then a read-modify-write is one block, and the rest is whole blocks.
    const std::uint64_t block_end = floor_block(from) + kAlignment;
    const bool partial = from != floor_block(from) || to < block_end;
    to = partial ? std::min(last, block_end) : floor_block(to);
    bounced = partial || !aligned(memory) ||
              (transfer->descriptor->pays_per_page && to - from >= kCopyFrom && !registered(memory, to - from) &&
               !on_huge_pages(memory, to - from));
    if (bounced) to = std::min<std::uint64_t>(to, from + kBouncePools[1].bytes);
  }
  const int pool = to - from <= kBouncePools[0].bytes ? 0 : 1;
  if (bounced && bounce_free_[pool].size() <= (background ? kBouncePools[pool].count / 2 : 0)) return false;
  const std::size_t in_flight = queues_[0].bytes + queues_[1].bytes;
  if (in_flight != 0 && in_flight + (to - from) > window_) return false;
  if (background && queue.bytes != 0 && queue.bytes + (to - from) > window_ / 2) return false;

  char* buffer = nullptr;
  if (bounced) {
    buffer = bounce_free_[pool].back();
    bounce_free_[pool].pop_back();
    counters_.bounced_bytes += to - from;
  }
  Request* request = free_.back();
  free_.pop_back();
  request->assign(transfer, to, buffer);
  ++queue.slots;
  queue.bytes += request->covers();
  ++transfer->in_flight;
  transfer->cut_until(to);
  if (transfer->all_cut()) {
    queue.transfers.pop_front();
    queue.room.notify_one();
  }
  make_ready(request);
  if (bounced && !is_mapped(memory, to - from)) request->injected = EFAULT;
  return true;
}

void QueueEngine::make_ready(Request* request) {
  request->prepare();
  if (FaultPlan* faults = request->transfer->faults.get()) faults->apply(*request);
  ++counters_.device_requests;
  if (!request->late) return ready_.push_back(request);
  late_.push_back(request);
  std::push_heap(late_.begin(), late_.end(), later);
}

void QueueEngine::complete(Completion* first, std::size_t count) {
  Progress progress[kPerLock];
  while (count != 0) {
    const std::size_t some = std::min(count, kPerLock);
    // advance() may copy a whole request, so before the lock.
    for (std::size_t i = 0; i < some; ++i) progress[i] = first[i].request->advance(first[i].result);
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < some; ++i) settle(first[i].request, progress[i]);
    first += some;
    count -= some;
  }
}

void QueueEngine::settle(Request* request, Progress progress) {
  if (request->fixed) ++counters_.fixed_requests;
  if (progress != Progress::finished && !dead_) {
    if (progress == Progress::again) ++counters_.continued;
    return make_ready(request);
  }
  if (progress != Progress::finished) request->give_up(dead_);
  const std::shared_ptr<Transfer> transfer = std::move(request->transfer);
  Queue& queue = this->queue(request->priority);
  if (request->bounce) bounce_free_[request->covers() <= kBouncePools[0].bytes ? 0 : 1].push_back(request->bounce);
  --queue.slots;
  queue.bytes -= request->covers();
  free_.push_back(request);
  if (request->error != 0) transfer->fail(request->mark + (request->done_until - request->begin), request->error);
  --transfer->in_flight;
  if (transfer->failed()) this->queue(transfer->priority).remove(transfer);  // what is left of it is not started
  if (transfer->settled()) finish(transfer);
}

void QueueEngine::finish(const std::shared_ptr<Transfer>& transfer) {
  (transfer->operation == Operation::read ? counters_.bytes_read : counters_.bytes_written) += transfer->done_bytes();
  transfer->finish();
  if (--outstanding_ == 0) idle_.notify_all();
}

void QueueEngine::abandon(int code) {
  std::lock_guard<std::mutex> lock(mutex_);
  dead_ = code;
  ready_.clear();
  late_.clear();
  for (Request& slot : slots_) {
    if (!slot.transfer) continue;
    slot.give_up(code);
    settle(&slot, Progress::finished);
  }
  for (Queue& queue : queues_) {
    for (const std::shared_ptr<Transfer>& transfer : queue.transfers) {
      transfer->fail(transfer->mark(), code);
      finish(transfer);
    }
    queue.transfers.clear();
    queue.room.notify_all();
  }
}

}  // namespace infinity::aio
