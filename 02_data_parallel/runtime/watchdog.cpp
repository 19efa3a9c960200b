#include "02_data_parallel/runtime/watchdog.h"

#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <string_view>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/launcher.h"

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

// mpirun reads at most 4096 bytes at a time, of whatever has come. So each piece is shorter, and the next waits until
// the pipe has been emptied.
void print_report(const std::string& text) {
    constexpr size_t kPiece = 4096;
    for (std::string_view left = text; !left.empty();) {
        const size_t line = left.substr(0, kPiece).rfind('\n');
        const std::string_view piece = left.substr(0, line == left.npos ? kPiece : line + 1);
        int unread = 0;
        for (int i = 0; i < 100 && ::ioctl(STDERR_FILENO, FIONREAD, &unread) == 0 && unread > 0; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const ssize_t written = ::write(STDERR_FILENO, piece.data(), piece.size());
        if (written <= 0) return;
        left.remove_prefix(size_t(written));
    }
}

namespace {
// Ends all ranks from a thread of the watchdog.
[[noreturn]] void end_with(const std::string& report) {
    print_report(report);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others' reports end, too
    // The standard does not allow MPI_Abort in this thread. If it does not return, the alarm ends this rank and mpirun
    // the others.
    ::signal(SIGALRM, SIG_DFL);
    alarm(5);
    end_all_ranks(1);
    std::_Exit(1);
}

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

constexpr double kStopped = 1;  // seconds between two ticks of a process that was stopped; usual are 0.1
constexpr double kKept = 5;     // for so long a rank that was stopped and runs again is still reported

void Watchdog::count_beats(double seconds) {
    const std::lock_guard lock(mutex_);
    for (Beat& beat : beats_) {
        if (beat.rank == this_rank) ++*beat.count;
        const uint64_t count = *beat.count;
        if (count == beat.seen) {
            beat.unchanged += seconds;
            continue;
        }
        // mpirun wakes a rank that was stopped before it ends all: other ranks' reports still name that one.
        beat.beating = beat.unchanged > kStopped ? 0 : beat.beating + seconds;
        if (beat.unchanged > kStopped) beat.silence = beat.unchanged;
        if (beat.beating > kKept) beat.silence = 0;
        beat.unchanged = 0;
        beat.seen = count;
    }
}

std::string Watchdog::missing() {
    const double timeout = timeout_, least = timeout > 0 ? std::min(timeout / 2, 5.0) : 5;  // a busy machine is late
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const Beat& beat : beats_)
        if (const double silence = std::max(beat.unchanged, beat.silence); silence > least)
            text += fmt::format("{}rank {} has not responded for {:.1f} s (stopped, ended or on an overloaded machine)",
                                text.empty() ? "" : ", ", beat.rank, silence);
    return text;
}

std::string Watchdog::too_long_a_pause() {
    const std::lock_guard lock(mutex_);
    if (pauses_ == 0) return paused_ = 0, std::string();
    for (const Beat& beat : beats_)
        if (timeout_ > 0 && std::min(beat.unchanged, paused_) > timeout_)
            return fmt::format(
                "rank {} has not responded for {:.0f} s (--comm-timeout) while files are read or written, or GPUs "
                "start",
                beat.rank, timeout_.load());
    if (paused_ > kLongestPause)
        return fmt::format(
            "files have been read or written, or GPUs started, for {:.0f} s: a disk or a rank of another node does not "
            "respond",
            kLongestPause);
    return {};
}

void Watchdog::run() {
    const sigset_t set = handled_signals();
    double last = now_seconds(), stopped = 0, woken = 0;
    while (true) {
        const timespec period{.tv_sec = 0, .tv_nsec = 100'000'000};
        const int signal = sigtimedwait(&set, nullptr, &period);
        if (stop_) return;
        const double now = now_seconds();
        if (now - last > kStopped) stopped = now - last, woken = now;
        const bool ends_run = signal == SIGUSR1 || (signal == SIGTERM && !is_under_mpirun());
        if (stops_on_signals_ && ends_run) {
            if (!stop_requested_.exchange(true) && this_rank == 0)
                print_report(fmt::format("{}: stops after this step\n", signal == SIGUSR1 ? "SIGUSR1" : "SIGTERM"));
        } else if (signal == SIGUSR1) {
            print_report(fmt::format("rank {}: ended by SIGUSR1\n", this_rank));
            std::_Exit(128 + SIGUSR1);
        } else if (signal == SIGTERM) {
            constexpr size_t kShown = 8;  // enough to see where the ranks are; Ctrl-C prints it on all of them
            std::string why = missing();
            if (now - woken < kKept) why = fmt::format("it was stopped until now, for {:.0f} s", stopped);
            if (!error_is_printed_)
                print_report(fmt::format("rank {}: terminated by SIGTERM; {}{}{}", this_rank, why,
                                         why.empty() ? "" : "; ", collective_log().text(kShown)));
            std::_Exit(128 + SIGTERM);
        }
        // A tick that took much longer: this process was stopped (Ctrl-Z, a suspended machine), which is no timeout.
        const double seconds = std::min(now - last, 0.5);
        last = now;
        count_beats(seconds);
        paused_ += pauses_ > 0 ? seconds : 0;
        const auto late = collective_log().tick(pauses_ > 0 ? 0 : seconds, timeout_);
        const std::string pause = too_long_a_pause();
        if (!late && pause.empty()) continue;
        if (!late) end_with(fmt::format("rank {}: {}\n", this_rank, pause));
        std::string who = missing();
        if (who.empty()) who = "no rank of this node has stopped: one of another is missing, or one made another call";
        end_with(fmt::format("rank {}: {} has not ended after {:.0f} s (--comm-timeout): {}; {}", this_rank, late->what,
                             timeout_.load(), who, collective_log().text()));
    }
}

}  // namespace train70b
