// Seconds of a step in which it waits for data, with the reading thread and without it, from a cold and a warm page
// cache: docs/measure.py runs it. Writes shards into a folder of its own, which is gone at the end.
//
//     test_measure_data --csv FILE
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "01_single_gpu/complete/trainer.h"
#include "01_single_gpu/core/say.h"
#include "tests/shards.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kShards = 32, kTokens = int64_t(1) << 23;  // 512 MiB

void drop_caches(const Folder& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder.path)) {
        const int file = ::open(entry.path().c_str(), O_RDONLY);
        if (file < 0 || ::fsync(file) != 0 || ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) != 0)
            throw std::runtime_error(entry.path().string() + ": its pages cannot be dropped");
        ::close(file);
    }
}

// Milliseconds of each step but the first two, ascending.
struct DataTimes : RunControl {
    std::vector<double> data, step;
    void complete(StepReport& report) override {
        if (report.step <= 2) return;
        data.push_back(1e3 * report.data_s);
        step.push_back(1e3 * report.step_s);
    }
};

DataTimes measure(const TrainOptions& o, const Folder& folder, bool cold, bool thread) {
    const Quiet quiet;
    const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
    Llama model(o.model, o.llama());
    Trainer trainer(o, model, data);
    DataTimes times;
    trainer.controls.push_back(&times);
    trainer.allocate();
    if (cold) drop_caches(folder);  // the tokens have been checked, and are in it
    if (thread) {
        trainer.run();
    } else {
        trainer.start();
        for (int64_t step = 1; step <= o.steps; ++step) trainer.step(step);
    }
    std::sort(times.data.begin(), times.data.end());
    std::sort(times.step.begin(), times.step.end());
    return times;
}

}  // namespace

int main(int argc, char** argv) {
    return run_program(argc, argv, [&](int count, char** words) {
        if (count != 3 || std::string(words[1]) != "--csv") usage_error("--csv FILE: is missing");
        const Folder folder;
        for (int64_t i = 0; i < kShards; ++i)
            write_shard(folder / fmt::format("{:02}.bin", i), random_tokens(kTokens, uint64_t(i)));
        TrainOptions o;
        o.model = {.name = "small", .layers = 2, .hidden = 64, .heads = 4, .kv_heads = 2, .ffn = 128, .vocab = 256};
        o.data = folder.text();
        o.seq_len = 128;
        o.global_batch = o.micro_batch = 64;
        o.steps = 22;
        o.device = "cpu";
        std::string csv = "page_cache,reading,data_ms_median,data_ms_largest,step_ms_median\n";
        for (const bool cold : {true, false})
            for (const bool thread : {false, true}) {
                const DataTimes times = measure(o, folder, cold, thread);
                csv += fmt::format("{},{},{:.3f},{:.3f},{:.1f}\n", cold ? "cold" : "warm",
                                   thread ? "thread" : "step itself", times.data[times.data.size() / 2],
                                   times.data.back(), times.step[times.step.size() / 2]);
            }
        write_text(words[2], csv);
    });
}
