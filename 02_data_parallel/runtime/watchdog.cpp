#include "02_data_parallel/runtime/watchdog.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <string_view>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

CollectiveLog& collective_log() {
    static auto* instance = new CollectiveLog();  // never destroyed: the watchdog may still read it
    return *instance;
}

uint64_t CollectiveLog::add(std::string what, const std::source_location& where) {
    const std::lock_guard lock(mutex_);
    const uint64_t id = next_++;
    open_[id] = {.id = id, .what = std::move(what), .where = where};
    return id;
}

void CollectiveLog::set(uint64_t id, State state, const RequestPtr& request) {
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(id);
    if (found == open_.end()) return;
    Record& record = found->second;
    if (record.begin == 0) record.begin = now_seconds();
    record.state = state;
    record.waited = 0;
    // Only what the device must be asked about: its last reference may be dropped in the watchdog's thread, and other
    // requests hold buffers of the main one.
    if (request && request->on_stream()) record.request = request;
    record.begun = !record.request;
    if (state == State::done) close(found);
}

std::map<uint64_t, CollectiveLog::Record>::iterator CollectiveLog::close(std::map<uint64_t, Record>::iterator entry) {
    Record& record = entry->second;
    record.state = State::done;
    record.end = now_seconds();
    record.request.reset();
    ended_.push_back(std::move(record));
    if (ended_.size() > kKept) ended_.pop_front();
    return open_.erase(entry);
}

std::optional<CollectiveLog::Record> CollectiveLog::tick(double seconds, double limit) {
    const std::lock_guard lock(mutex_);
    for (auto& [id, record] : open_) {
        if (record.state != State::running || !record.begun) continue;
        record.waited += seconds;
        if (limit > 0 && record.waited > limit) return record;
    }
    return {};
}

std::string CollectiveLog::poll_device() {
    std::map<uint64_t, RequestPtr> on_device;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& [id, record] : open_)
            if (record.state == State::running && record.request) on_device[id] = record.request;
    }
    for (const auto& [id, request] : on_device) {  // without the lock: the device may be slow to answer
        const bool begun = request->started(), finished = begun && request->finished();
        const std::string failure = finished ? std::string() : request->failure();
        const std::lock_guard lock(mutex_);
        const auto found = open_.find(id);
        if (found == open_.end()) continue;
        found->second.begun = begun;
        if (!failure.empty()) return fmt::format("{} has failed: {}", found->second.what, failure);
        if (finished) close(found);
    }
    return {};
}

std::string CollectiveLog::text(size_t most) {
    const std::lock_guard lock(mutex_);
    std::map<uint64_t, const Record*> all;
    for (const Record& record : ended_) all[record.id] = &record;
    for (const auto& [id, record] : open_) all[id] = &record;
    while (all.size() > most && all.begin()->second->state == State::done) all.erase(all.begin());
    std::string text = fmt::format("its last {} collectives, oldest first\n", all.size());
    const double now = now_seconds();
    for (const auto& [id, record] : all) {
        std::string_view file = record->where.file_name();
        const std::string time =
            record->state == State::done     ? fmt::format("{:.3f} ms", (record->end - record->begin) * 1e3)
            : record->state == State::queued ? std::string("not begun")
                                             : fmt::format("NOT ENDED after {:.1f} s", now - record->begin);
        text += fmt::format("rank {}:   {}  {}:{}  {}\n", this_rank, record->what, file, record->where.line(), time);
    }
    return text;
}

namespace {
void to_stderr(const std::string& text) {  // in one call, so that the logs of several ranks do not interleave
    std::string_view left = text;
    while (!left.empty()) {
        const ssize_t written = ::write(STDERR_FILENO, left.data(), left.size());
        if (written <= 0) return;
        left.remove_prefix(size_t(written));
    }
}

// Ends all ranks from a thread of the watchdog.
[[noreturn]] void end_with(const std::string& report) {
    to_stderr(report);
    // The standard does not allow MPI_Abort in this thread. If it does not return, the alarm ends this rank and mpirun
    // the others.
    ::signal(SIGALRM, SIG_DFL);
    alarm(5);
    end_all_ranks(1);
    std::_Exit(1);
}
}  // namespace

namespace {
sigset_t handled_signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    return set;
}
}  // namespace

void block_signals() {
    const sigset_t set = handled_signals();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Watchdog::Watchdog()
    : thread_([this] { run(); }), device_thread_([this] {
          while (!stop_) {
              // A kernel of NCCL that lost its peer never ends: without this the host would wait for it forever.
              const std::string failed = collective_log().poll_device();
              if (!failed.empty()) end_with(fmt::format("rank {}: {}; {}", this_rank, failed, collective_log().text()));
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
          }
      }) {}

Watchdog::~Watchdog() {
    stop_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
    device_thread_.join();
}

void Watchdog::watch(std::vector<Beat> beats) {
    const std::lock_guard lock(mutex_);
    beats_ = std::move(beats);
}

void Watchdog::unwatch() { watch({}); }

std::string Watchdog::missed_beat(double seconds) {
    const std::lock_guard lock(mutex_);
    for (const Beat& beat : beats_)
        if (beat.rank == this_rank) ++*beat.count;
    if (pauses_ == 0) {
        paused_ = 0;
        for (Beat& beat : beats_) beat.unchanged = 0;
        return {};
    }
    paused_ += seconds;
    for (Beat& beat : beats_) {
        const uint64_t count = *beat.count;
        beat.unchanged = count == beat.seen ? beat.unchanged + seconds : 0;
        beat.seen = count;
        if (timeout_ > 0 && beat.unchanged > timeout_)
            return fmt::format(
                "rank {} has not responded for {:.0f} s (--comm-timeout) while files are read or written", beat.rank,
                timeout_.load());
    }
    if (paused_ > kLongestPause)
        return fmt::format(
            "files have been read or written for {:.0f} s: a disk or a rank of another node does not respond",
            kLongestPause);
    return {};
}

void Watchdog::run() {
    const sigset_t set = handled_signals();
    double last = now_seconds();
    while (true) {
        const timespec period{.tv_sec = 0, .tv_nsec = 100'000'000};
        const int signal = sigtimedwait(&set, nullptr, &period);
        if (stop_) return;
        const bool ends_run = signal == SIGUSR1 || (signal == SIGTERM && !std::getenv("OMPI_COMM_WORLD_SIZE"));
        if (stops_on_signals_ && ends_run) {
            if (!stop_requested_.exchange(true) && this_rank == 0)
                to_stderr(fmt::format("{}: stops after this step\n", signal == SIGUSR1 ? "SIGUSR1" : "SIGTERM"));
        } else if (signal == SIGUSR1) {
            to_stderr(fmt::format("rank {}: ended by SIGUSR1\n", this_rank));
            std::_Exit(128 + SIGUSR1);
        } else if (signal == SIGTERM) {
            constexpr size_t kShown = 8;  // enough to see where the ranks are; Ctrl-C prints it on all of them
            if (!error_is_printed_)
                to_stderr(fmt::format("rank {}: terminated by SIGTERM; {}", this_rank, collective_log().text(kShown)));
            std::_Exit(128 + SIGTERM);
        }
        // A tick that took much longer: this process was stopped (Ctrl-Z, a suspended machine), which is no timeout.
        const double now = now_seconds();
        const double seconds = std::min(now - last, 0.5);
        const auto late = collective_log().tick(pauses_ > 0 ? 0 : seconds, timeout_);
        const std::string missed = missed_beat(seconds);
        last = now;
        if (!late && missed.empty()) continue;
        end_with(
            late ? fmt::format(
                       "rank {}: {} has not ended after {:.0f} s (--comm-timeout): a rank of its group is missing; {}",
                       this_rank, late->what, timeout_.load(), collective_log().text())
                 : fmt::format("rank {}: {}\n", this_rank, missed));
    }
}

}  // namespace train70b
