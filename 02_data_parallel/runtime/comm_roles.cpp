#include "02_data_parallel/runtime/comm_roles.h"

#include <nlohmann/json.hpp>

#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

namespace {

class CommGroup : public Group {
  public:
    explicit CommGroup(const Comm& comm) : comm_(comm) {}
    int rank() const override { return comm_.rank(); }
    int size() const override { return comm_.size(); }
    std::vector<double> sum(const std::vector<double>& x) const override { return comm_.sum(x); }
    std::vector<double> gather(const std::vector<double>& local) const override { return comm_.gather(local); }
    void sum_tensor(Tensor x) const override { comm_.all_reduce(x).wait(); }
    void all_gather(Tensor full, const Tensor& part) const override { comm_.all_gather(full, part).wait(); }
    void send(const Tensor& x, int to) const override { comm_.send(x, to).wait(); }
    void recv(Tensor x, int from) const override { comm_.recv(x, from).wait(); }

  private:
    const Comm comm_;
};

}  // namespace

GroupPtr group_of(const Comm& comm) { return std::make_shared<CommGroup>(comm); }

void write_files(const Comm& world, const std::function<void()>& body) {
    const auto pause = watchdog->pause();
    body();
    world.barrier().wait();
}

std::vector<MemoryPeak> gather_peaks(const Comm& ranks, const MemoryPeak& local) {
    std::vector<double> numbers(local.kind.begin(), local.kind.end());  // whole numbers, exact up to 2^53 bytes
    numbers.push_back(double(local.total));
    const std::vector<double> all = ranks.gather(numbers);
    std::vector<MemoryPeak> peaks;
    for (auto begin = all.begin(); begin < all.end(); begin += int64_t(numbers.size())) {
        MemoryPeak& peak = peaks.emplace_back();
        for (int i = 0; i < kMemoryKinds; ++i) peak.kind[i] = int64_t(begin[i]);
        peak.total = int64_t(begin[kMemoryKinds]);
    }
    return peaks;
}

int64_t sent_bytes(const StepReport& step, const std::string& prefix, const std::string& suffix) {
    int64_t sum = 0;
    for (const auto& [operation, bytes] : step.comm_bytes)
        if (operation.starts_with(prefix) && operation.ends_with(suffix) && !operation.ends_with(".scalar"))
            sum += bytes;
    return sum;
}

void CommRuntime::end_step(StepReport& report) {
    const CommStats stats = world_.take_stats();
    report.waited_s = stats.waited;
    for (const auto& [name, entry] : stats.operations) {
        report.comm_bytes[name] = entry.bytes;
        report.comm_s += entry.seconds;
    }
}

void CommRuntime::start_trace() {
    if (!has_peers()) return;
    CHECK(world_.size() == world_size(), "a trace of {} of {} ranks", world_.size(), world_size());
    trace_.emplace();
}

void CommRuntime::merge_traces(GrowingFile* file, EventFile& events, const std::string& title) {
    if (!trace_) return;
    write_files([&] { trace_->merge(file, events, title); });
    trace_.reset();
}

nlohmann::ordered_json CommRuntime::memory_per_rank(const MemoryPeak& local) const {
    auto list = nlohmann::ordered_json::array();
    if (!world_.has_peers()) {  // a simulated rank: its own memory is all there is
        list.push_back(to_json(local));
        list.back()["rank"] = world_.rank();
        return list;
    }
    for (const MemoryPeak& peak : gather_peaks(world_, local)) list.push_back(to_json(peak));
    return list;
}

}  // namespace train70b
