// Streams that are threads, and what goes wrong in them. For devices that are made of host memory: device.cpp, and the
// fake CUDA beside it.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace hosted {
using Task = std::function<void()>;
using Lock = std::unique_lock<std::mutex>;

inline std::atomic<int> longest_copy_us{0}, longest_kernel_us{0};

// What went wrong in a stream; kept until somebody waits, as on a GPU.
inline std::mutex failure_m;
inline std::string failure;

inline void note(std::string what) {
  Lock lock(failure_m);
  if (failure.empty()) failure = what.substr(0, what.find("\nException raised from"));  // what follows is torch's backtrace
}
inline std::string take_failure() {
  Lock lock(failure_m);
  return std::exchange(failure, "");
}

class Stream {
 public:
  explicit Stream(int device = 0) : device(device), random_(std::random_device{}()) { std::thread([this] { run(); }).detach(); }
  void push(Task task) {
    { Lock lock(m_); queue_.push_back(std::move(task)); }
    cv_.notify_all();
  }
  bool idle() { Lock lock(m_); return queue_.empty() && !busy_; }
  void sync() { Lock lock(m_); cv_.wait(lock, [&] { return queue_.empty() && !busy_; }); }
  // For the stream's own thread: what each piece of work takes longer, and one in so many any time up to the longest.
  void linger(int longest_us, int one_in = 1) {
    int us = slow_us;
    if (longest_us && random_() % one_in == 0) us += random_() % longest_us;
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  const int device;
  std::atomic<int> slow_us{0};

 private:
  void run() {
    for (;;) {
      Task task;
      {
        Lock lock(m_);
        cv_.wait(lock, [&] { return !queue_.empty(); });
        task = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
      }
      try { task(); } catch (const std::exception& error) { note(error.what()); }
      task = nullptr;
      { Lock lock(m_); busy_ = false; }
      cv_.notify_all();
    }
  }
  std::mutex m_;
  std::condition_variable cv_;
  std::deque<Task> queue_;
  bool busy_ = false;
  std::minstd_rand random_;  // of the thread alone
};

struct Point {  // of a stream; shared by the event and by what waits for it
  std::mutex m;
  std::condition_variable cv;
  bool passed = false;
  std::chrono::steady_clock::time_point at;
  void pass() {
    { Lock lock(m); passed = true; at = std::chrono::steady_clock::now(); }
    cv.notify_all();
  }
  void wait() { Lock lock(m); cv.wait(lock, [&] { return passed; }); }
  bool query() { Lock lock(m); return passed; }
};

inline std::shared_ptr<Point> record(Stream& on) {
  auto point = std::make_shared<Point>();
  on.push([point] { point->pass(); });
  return point;
}
}  // namespace hosted
