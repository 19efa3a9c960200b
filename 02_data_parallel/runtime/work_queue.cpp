#include "02_data_parallel/runtime/work_queue.h"

#include <thread>
#include <utility>

#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/recorder.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

// ---- Work: queued, launched, completed -----------------------------------------------------------------------------

bool Work::done() {
    if (!state_) return true;
    if (!state_->launched || (state_->request && !state_->request->test())) return false;
    std::exchange(state_, nullptr)->complete();
    return true;
}

void Work::wait() {
    if (const auto state = std::exchange(state_, nullptr)) state->wait();
}

void Work::State::wait() {
    if (recorder) recorder->wait(recorded);
    group->shared->queue.launch_all();
    complete();
}

void WorkQueue::launch_all() {
    while (!queue_.empty()) {
        const std::shared_ptr<Work::State> next = std::move(queue_.front());
        queue_.pop_front();
        next->launch();
    }
}

void Work::State::launch() {
    using LogState = CollectiveLog::State;
    launched = true;
    collective_log().set(log_id, LogState::running);
    const double begin = now_seconds();
    const std::string span_name = group->name + "." + operation.name;
    Span span(span_name.c_str(), "comm");
    span.detail(label);
    if (group->shared->queue.check() && !operation.message) check_agreement();
    if (recorder) recorder->begin_transport();
    request = operation.run(*group->backend);
    if (recorder) recorder->end_transport();
    operation.run = nullptr;
    if (request) {
        collective_log().set(log_id, request->on_stream() ? LogState::running : LogState::posted, request);
    } else {
        if (!group->shared->queue.check()) operation.tensors.clear();  // else as with a request: check_tensors
        collective_log().set(log_id, LogState::done);
        add_seconds(now_seconds() - begin);
    }
}

void Work::State::complete() {
    waited = true;
    if (!request) return operation.tensors.clear();
    const RequestPtr waiting = std::exchange(request, nullptr);
    if (waiting->on_stream()) {
        waiting->wait();  // orders streams; the host does not wait
        group->shared->queue.read_clock_later(*this, waiting);
    } else {
        collective_log().set(log_id, CollectiveLog::State::running);
        const double begin = now_seconds();
        const std::string span_name = group->name + "." + operation.name;
        Span span(span_name.c_str(), "comm_wait");
        span.detail(label);
        waiting->wait();
        collective_log().set(log_id, CollectiveLog::State::done);
        add_seconds(now_seconds() - begin);
    }
    operation.tensors.clear();
}

// If nobody waited, wait here, before the tensors are freed. But when an error ends this rank, its peer may never
// arrive: then leak the request and the tensors, to which MPI or the device may still write.
Work::State::~State() {
    if (request && std::uncaught_exceptions() == 0) {
        wait();
    } else if (request) {
        new RequestPtr(std::move(request));
        new std::vector<Tensor>(std::move(operation.tensors));
    }
}

// ---- seconds and bytes ----------------------------------------------------------------------------------------------

void Work::State::add_seconds(double seconds) {
    group->sums[operation.name].seconds += seconds;
    group->shared->queue.add_wait(seconds);
}

void WorkQueue::read_clock_later(const Work::State& work, RequestPtr request) {
    on_device_.push_back({work.group, work.operation.name, std::move(request)});
    if (on_device_.size() > 1000) read_clocks(500);
}

double WorkQueue::take_waited() {
    read_clocks(0);
    return std::exchange(waited_, 0);
}

void WorkQueue::read_clocks(size_t leave) {
    for (; on_device_.size() > leave; on_device_.pop_front()) {
        const OnDevice& oldest = on_device_.front();
        const auto times = oldest.request->times();
        const std::shared_ptr<Comm::Group> group = oldest.group.lock();
        if (!times || !group) continue;
        group->sums[oldest.operation].seconds += times->busy;
        waited_ += times->stalled;
    }
}

CommStats Comm::take_stats() const {
    CommStats stats;
    if (!group_) return stats;
    stats.waited = group_->shared->queue.take_waited();
    for (const std::weak_ptr<Group>& weak : group_->shared->groups) {
        const std::shared_ptr<Group> group = weak.lock();
        if (!group) continue;
        for (auto& [operation, sums] : group->sums) {
            if (sums.calls == 0) continue;
            CommStats::Entry& entry = stats.operations[group->name + "." + operation];
            entry.calls += sums.calls;
            entry.bytes += sums.bytes / group->backend->size();
            entry.seconds += sums.seconds;
            sums = {};
        }
    }
    return stats;
}

// ---- --comm-check ---------------------------------------------------------------------------------------------------

// Every rank tells all others what it is about to do, and where it was called.
void Work::State::check_agreement() const {
    const std::source_location& where = operation.where;
    Backend& backend = *group->backend;
    const std::vector<std::string> all =
        backend.gather_text(fmt::format("{}\n{}:{}", label, where.file_name(), where.line()));
    const auto call = [](const std::string& text) { return text.substr(0, text.find('\n')); };
    bool equal = true;
    for (const std::string& text : all) equal = equal && call(text) == call(all[0]);
    const std::string counts = equal ? check_counts() : "";
    if (equal && counts.empty()) return;
    std::string report = fmt::format(
        "mismatch: the ranks of group {} disagree about what comes next (--comm-check)\n{}", group->name, counts);
    for (size_t i = 0; i < all.size(); ++i)
        report +=
            fmt::format("  rank {}: {}  at {}\n", group->ranks[i], call(all[i]), all[i].substr(all[i].find('\n') + 1));
    if (backend.rank() == 0) {
        print_report(fmt::format("{}rank {}: {}", report, this_rank, collective_log().text()));
    } else {
        std::this_thread::sleep_for(std::chrono::seconds(2));  // rank 0 of the group prints and ends all ranks
    }
    end_all_ranks(1);
    throw std::runtime_error(report);  // where a test has replaced end_all_ranks
}

// The first message of a call with counts of which the two ranks disagree, in words; the same on every rank.
std::string Work::State::check_counts() const {
    Backend& backend = *group->backend;
    if (operation.sent.empty() || !backend.has_peers()) return {};
    std::vector<double> own(operation.sent.begin(), operation.sent.end());
    own.insert(own.end(), operation.received.begin(), operation.received.end());
    const std::vector<double> all = backend.gather(own);
    const size_t n = operation.sent.size();
    for (size_t from = 0; from < n; ++from)
        for (size_t to = 0; to < n; ++to)
            if (const double out = all[from * 2 * n + to], in = all[to * 2 * n + n + from]; out != in)
                return fmt::format("  rank {} sends {} elements to rank {}, which expects {}\n", group->ranks[from],
                                   out, group->ranks[to], in);
    return {};
}

void WorkQueue::check_tensors(const std::shared_ptr<Work::State>& work) {
    if (!check_) return;
    std::erase_if(pending_, [](const std::weak_ptr<Work::State>& weak) {
        const std::shared_ptr<Work::State> earlier = weak.lock();
        return !earlier || earlier->waited;
    });
    for (const std::weak_ptr<Work::State>& weak : pending_) {
        const std::shared_ptr<Work::State> earlier = weak.lock();
        const Operation &own = work->operation, &peer = earlier->operation;
        const bool shifts = own.shift && peer.shift && work->group->backend->on_stream();
        if (earlier->group == work->group && (shifts || (!own.message && !peer.message))) continue;
        for (size_t i = 0; i < own.tensors.size(); ++i)
            for (size_t k = 0; k < peer.tensors.size(); ++k)
                CHECK(!own.tensors[i].overlaps(peer.tensors[k]) || (i >= own.written && k >= peer.written),
                      "{} at {}:{} shares a tensor with {} at {}:{}, which nobody has waited for (--comm-check)",
                      work->label, own.where.file_name(), own.where.line(), earlier->label, peer.where.file_name(),
                      peer.where.line());
    }
    pending_.push_back(work);
}

}  // namespace train70b
