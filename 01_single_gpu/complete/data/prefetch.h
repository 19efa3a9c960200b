#pragma once
// Results that a thread prepares in advance, in order and at most so many ahead of the one in use.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "01_single_gpu/core/check.h"

namespace train70b {

template <class T>
class Prefetch {
  public:
    // The thread calls make(first), ..., make(last), one after another, and waits while `ahead` results beyond the one
    // in use are ready. make must neither communicate nor compute on several threads.
    Prefetch(int64_t first, int64_t last, int64_t ahead, std::function<T(int64_t)> make)
        : first_(first), last_(last), most_(ahead + 1), make_(std::move(make)), thread_([this, first] {
              run(first);
          }) {}
    Prefetch(const Prefetch&) = delete;
    // Waits for the call of make that is under way; what is left is not made.
    ~Prefetch() {
        {
            const std::lock_guard lock(mutex_);
            stops_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    // Whether get(number) is possible: it is one of the numbers, and no later one was asked for.
    bool has(int64_t number) const {
        const std::lock_guard lock(mutex_);
        return first_ <= number && number <= last_;
    }
    // Waits for make(number), whose result is valid until a later number is asked for; drops those before it. Throws
    // what make(number), or one before it, has thrown.
    const T& get(int64_t number) {
        std::unique_lock lock(mutex_);
        CHECK(first_ <= number && number <= last_, "{} of {} to {}", number, first_, last_);
        while (true) {
            for (; first_ < number && !ready_.empty(); ++first_) ready_.pop_front();
            changed_.notify_all();
            if (!ready_.empty()) return ready_.front();  // a deque's elements stay where they are when others are added
            changed_.wait(lock, [&] { return !ready_.empty() || error_; });
            if (ready_.empty()) std::rethrow_exception(error_);
        }
    }
    int64_t ready() const {  // for tests
        const std::lock_guard lock(mutex_);
        return int64_t(ready_.size());
    }

  private:
    void run(int64_t first) {
        try {
            for (int64_t number = first; number <= last_; ++number) {
                {
                    std::unique_lock lock(mutex_);
                    changed_.wait(lock, [&] { return stops_ || int64_t(ready_.size()) < most_; });
                    if (stops_) return;
                }
                T result = make_(number);
                const std::lock_guard lock(mutex_);
                ready_.push_back(std::move(result));
                changed_.notify_all();
            }
        } catch (...) {
            const std::lock_guard lock(mutex_);
            error_ = std::current_exception();
            changed_.notify_all();
        }
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<T> ready_;  // of first_, first_ + 1, ...
    int64_t first_;
    const int64_t last_, most_;
    std::exception_ptr error_;
    bool stops_ = false;
    const std::function<T(int64_t)> make_;
    std::thread thread_;  // last: it uses the above
};

}  // namespace train70b
