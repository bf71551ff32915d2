// One pool of threads for every model of the process. Threads spin for a few microseconds
// between the phases of a pass and sleep between passes, so they leave the cores to torch.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Pool {
 public:
  static Pool& instance();

  // Runs body(thread, n_threads) on n_threads threads, the caller being thread 0.
  void run(int n_threads, const std::function<void(int, int)>& body);

  // Waits until every thread of the current run has arrived.
  void barrier();

 private:
  Pool() = default;
  void start_workers(int n);
  void work(int thread, std::uint64_t seen);
  void finish_one();

  std::mutex run_mutex_;  // one run at a time
  std::mutex wake_mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  int pid_ = 0;  // a forked child has none of its parent's threads

  alignas(64) std::atomic<std::uint64_t> run_id_{0};
  const std::function<void(int, int)>* body_ = nullptr;
  int active_ = 1;
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint64_t> phase_{0};
};

// Hands out [0, n) in chunks. Each thread starts on its own contiguous share, so that it
// streams through memory, and helps the others when it is done: a core that something else
// disturbs does not hold up the pass. Who computes a unit never changes its result.
class Shares {
 public:
  void reset(int n, int n_threads);
  // Next chunk [begin, end) for `thread`; false when nothing is left.
  bool next(int thread, int& begin, int& end);
  int first(int thread) const { return lanes_[thread].at.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Lane {
    std::atomic<int> at{0};
    int end = 0;
  };
  static constexpr int MAX_LANES = 64;
  Lane lanes_[MAX_LANES];
  int n_threads_ = 1;
  int chunk_ = 1;

 public:
  static constexpr int max_threads() { return MAX_LANES; }
};

}  // namespace paceline
