#include "pool.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spins until done(); after a while lets other threads of the machine have the core.
template <class Done>
void spin_until(Done done) {
  for (int i = 0; !done(); ++i) {
    if (i < 4000) {
      relax();
    } else {
      std::this_thread::yield();
      i = 3000;
    }
  }
}

constexpr int SPINS_BEFORE_SLEEP = 1000;  // some 30 microseconds

}  // namespace

Pool& Pool::instance() {
  static Pool* pool = new Pool;  // never destroyed: its threads may outlive main
  return *pool;
}

void Pool::start_workers(int n) {
  if (pid_ != getpid()) {
    for (std::thread& t : workers_) t.detach();  // they exist in the parent only
    workers_.clear();
    pid_ = getpid();
  }
  while (static_cast<int>(workers_.size()) < n)
    workers_.emplace_back(&Pool::work, this, static_cast<int>(workers_.size()) + 1,
                          run_id_.load());
}

void Pool::work(int thread, std::uint64_t seen) {
  for (;;) {
    const auto started = [&] { return run_id_.load(std::memory_order_acquire) != seen; };
    for (int i = 0; i < SPINS_BEFORE_SLEEP && !started(); ++i) relax();
    if (!started()) {
      std::unique_lock<std::mutex> lock(wake_mutex_);
      wake_.wait(lock, started);
    }
    seen = run_id_.load(std::memory_order_acquire);
    if (thread < active_) (*body_)(thread, active_);
    finish_one();
  }
}

void Pool::finish_one() { running_.fetch_sub(1, std::memory_order_acq_rel); }

void Pool::run(int n_threads, const std::function<void(int, int)>& body) {
  const std::lock_guard<std::mutex> only(run_mutex_);
  if (n_threads <= 1) {
    active_ = 1;
    body(0, 1);
    return;
  }
  start_workers(n_threads - 1);
  body_ = &body;
  active_ = n_threads;
  // Every worker, active or not, acknowledges a run, so none can miss one or see it twice.
  running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(wake_mutex_);
    run_id_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  body(0, n_threads);
  spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void Pool::barrier() {
  if (active_ <= 1) return;
  const std::uint64_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    spin_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
  }
}

void Shares::reset(int n, int n_threads) {
  n_threads_ = n_threads;
  chunk_ = n / (n_threads * 16) + 1;
  for (int t = 0; t < n_threads; ++t) {
    lanes_[t].at.store(static_cast<int>(static_cast<std::int64_t>(n) * t / n_threads),
                       std::memory_order_relaxed);
    lanes_[t].end = static_cast<int>(static_cast<std::int64_t>(n) * (t + 1) / n_threads);
  }
}

bool Shares::next(int thread, int& begin, int& end) {
  for (int i = 0; i < n_threads_; ++i) {
    Lane& lane = lanes_[(thread + i) % n_threads_];
    if (lane.at.load(std::memory_order_relaxed) >= lane.end) continue;
    begin = lane.at.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= lane.end) continue;
    end = begin + chunk_ < lane.end ? begin + chunk_ : lane.end;
    return true;
  }
  return false;
}

}  // namespace paceline
