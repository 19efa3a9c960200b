// A pipeline schedule without running it: from a file or by name, checked, simulated and drawn.
//
// Run:   build/bin/schedule --name 1f1b --stages 4 --micro-batches 8 --write my.txt
//        build/bin/schedule --file my.txt --costs 1,1,1 --hop 0.2 --slow-rank 1=1.5 --draw my.png
//        mpirun --oversubscribe -np 4 build/bin/05_pipeline --pp 4 --global-batch 8 --pipeline file:my.txt
// Watch: whether all ranks reach the end, with sends that are buffered and that wait for their receive; the idle time
//        by the clock and within a rank's own span; what a rank holds. Exit code 1 if the schedule cannot run.
#include <algorithm>
#include <set>

#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/number.h"
#include "01_single_gpu/core/registry.h"
#include "05_pipeline/complete/plot_script.h"
#include "05_pipeline/complete/schedule_file.h"
#include "05_pipeline/complete/schedule_report.h"

using namespace train70b;

namespace {

constexpr int64_t kMostRanks = 512;  // zb-v's lists take time in p^3

class Sandbox {
  public:
    Sandbox() {
        flags_.group("Schedule");
        flags_.add("--file", file_, "one line of steps per rank: F0 F1 B0 F2 ...", {{}, "FILE"}).default_text("");
        flags_
            .add("--name", name_, "a schedule by name [default: a table of all]",
                 one_of(names_of(schedule_generators())))
            .default_text("");
        flags_.add("--stages", stages_, "pipeline ranks", integer_from(1, kMostRanks))
            .default_text("4; the file's lines");
        flags_.add("--micro-batches", micro_batches_, "micro-batches of a training step", integer_from(1, 1'000'000))
            .default_text("8; the file's");
        flags_
            .add("--virtual-stages", virtual_stages_, "model chunks per rank, with --name interleaved",
                 integer_from(1, 4096))
            .default_text("2");
        flags_.group("Simulation");
        flags_
            .add_word("--costs", [this](const std::string& text) { read_costs(text); },
                      "time of F, I and W of a micro-batch on one rank; B = I + W", {{}, "F,I,W"})
            .default_text("1,1,1");
        flags_.add("--hop", costs_.hop, "time of a message between ranks", real_number(0, 1e6));
        flags_
            .add_word("--slow-rank", [this](const std::string& text) { read_slow_ranks(text); },
                      "a rank whose steps take TIMES as long; several: 1=1.5,3=2", {{}, "RANK=TIMES"})
            .default_text("");
        flags_.add("--steps", steps_, "training steps, one after another", integer_from(1, 1000));
        flags_.group("Output");
        add_output(write_, "FILE", "write the schedule");
        add_output(draw_, "FILE.png", "draw it (matplotlib)");
        add_output(csv_, "FILE.csv", "costs, time and memory of each rank");
        add_output(spans_, "FILE.csv", "every step: begin, end, activations held");
    }

    void run(int argc, char** argv) {
        flags_.parse(argc, argv);
        check_flags();
        const std::optional<Schedule> schedule = chosen();
        const int64_t p = schedule ? schedule->stages : stages_,
                      m = schedule ? schedule->micro_batches : micro_batches_;
        if (schedule) check_size(*schedule);
        for (const auto& [rank, times] : costs_.slow)
            if (rank >= p) usage_error("--slow-rank {}={}: there are ranks 0 to {}", rank, times, p - 1);
        std::string python;
        if (draw_.given()) python = python_with_matplotlib("--write, --csv and --spans-csv need");
        for (OptionalOutput* file : outputs()) file->open();
        if (schedule) print(*schedule, python);
        if (!schedule || !file_.empty())
            say("{}{}", schedule ? "\n" : "", comparison_table(schedule ? &*schedule : nullptr, p, m, costs_).text());
    }

  private:
    void add_output(OptionalOutput& file, const std::string& type, const std::string& text) {
        flags_.add(file.flag, file.path, text, {{}, type}).default_text("");
    }
    std::vector<OptionalOutput*> outputs() { return {&write_, &draw_, &csv_, &spans_}; }

    void read_costs(const std::string& text) {
        std::vector<double> times;
        for (const std::string& part : items_of(text)) {
            if (const std::string problem = real_number(0, 1e6).problem(part); !problem.empty())
                usage_error("--costs: {} (F,I,W: 1,1,1)", problem);
            times.push_back(*parse_number(part));
        }
        if (times.size() != 3 || std::ranges::max(times) == 0)
            usage_error("--costs: {} must be three numbers F,I,W that are not all 0", text);
        costs_.forward = times[0], costs_.input = times[1], costs_.weight = times[2];
    }

    void read_slow_ranks(const std::string& text) {
        std::set<std::string> ranks;
        for (const std::string& item : items_of(text)) {
            const std::vector<std::string> parts = items_of(item, '=');
            if (parts.size() != 2 || !integer_from(0).problem(parts[0]).empty() ||
                !real_number(0, 1e6, false).problem(parts[1]).empty())
                usage_error("--slow-rank: {} must be RANK=TIMES, as 1=1.5, or several: 1=1.5,3=2", text);
            if (!ranks.insert(parts[0]).second)
                usage_error("--slow-rank: {} has rank {} twice (must be once)", text, parts[0]);
            costs_.slow.emplace_back(std::stoll(parts[0]), *parse_number(parts[1]));
        }
    }

    void check_flags() {
        if (flags_.given("--file") && file_.empty()) usage_error("--file: must name a file");
        for (const OptionalOutput* file : outputs())
            if (flags_.given(file->flag) && !file->given()) usage_error("{}: must name a file", file->flag);
        if (flags_.given("--file") && flags_.given("--name"))
            usage_error("--file {} and --name {}: are two schedules (leave out one of them)", file_, name_);
        std::vector<PathUse> paths;
        if (!file_.empty()) paths.push_back({"--file", file_, false});
        for (const OptionalOutput* file : outputs()) {
            if (!file->given()) continue;
            if (file_.empty() && name_.empty()) usage_error("{}: needs a schedule (--file or --name)", file->flag);
            paths.push_back({file->flag, file->path, true});
        }
        check_paths(paths);
    }

    // What takes more than some seconds.
    void check_size(const Schedule& schedule) const {
        if (schedule.stages > kMostRanks)
            usage_error("--file {}: has {} lines of steps; at most {} ranks are simulated", file_, schedule.stages,
                        kMostRanks);
        constexpr int64_t kMost = 2'000'000;
        int64_t passes = 0;
        for (const auto& steps : schedule.ranks) passes += int64_t(steps.size());
        if (steps_ > 1 && passes > kMost / steps_)
            usage_error("--steps {}: more than {} passes in all; a training step has {} (try {})", steps_, kMost,
                        passes, std::max<int64_t>(1, kMost / passes));
    }

    std::optional<Schedule> chosen() const {
        if (!file_.empty()) {
            const std::string what = "--file " + file_;
            if (flags_.given("--virtual-stages"))
                usage_error("--virtual-stages: the chunks of {} are in the file", what);
            Schedule schedule = read_schedule(what, file_);
            const auto same = [&](const char* flag, int64_t asked, int64_t found) {
                if (flags_.given(flag) && asked != found)
                    usage_error("{} {}: {} has {} (leave the flag out)", flag, asked, what, found);
            };
            same("--stages", stages_, schedule.stages);
            same("--micro-batches", micro_batches_, schedule.micro_batches);
            return schedule;
        }
        const int64_t most = name_.empty() ? 200'000 : 1'000'000;  // passes forward: some seconds
        const int64_t passes = stages_ * std::max<int64_t>(virtual_stages_, 1);
        if (passes > most / micro_batches_)
            usage_error("--micro-batches {}: more than {} passes through --stages {}{} (try {})", micro_batches_, most,
                        stages_, virtual_stages_ > 1 ? fmt::format(" x --virtual-stages {}", virtual_stages_) : "",
                        std::max<int64_t>(1, most / passes));
        if (name_.empty()) {
            if (flags_.given("--virtual-stages")) usage_error("--virtual-stages: needs --name interleaved");
            if (flags_.given("--steps")) usage_error("--steps: needs a schedule (--file or --name)");
            return {};
        }
        const ScheduleGenerator& generator = find_schedule(name_);
        if (flags_.given("--virtual-stages") && generator.chunks != ScheduleGenerator::Chunks::loop)
            usage_error("--virtual-stages {}: --name {} has {} per rank (try --name interleaved)", virtual_stages_,
                        name_, generator.default_chunks() == 1 ? "one model chunk" : "two model chunks");
        if (generator.default_chunks() > 1 && stages_ == 1)
            usage_error("--name {}: needs at least two pipeline ranks (try --stages 2)", name_);
        if (const std::string problem = generator.problem(stages_, micro_batches_, "--stages"); !problem.empty())
            usage_error("--name {} --micro-batches {}: {}", name_, micro_batches_, problem);
        return make_schedule(name_, stages_, micro_batches_, virtual_stages_);
    }

    void print(const Schedule& schedule, const std::string& python) {
        const std::string where = file_.empty() ? name_ : file_;
        if (const std::string wrong = incomplete(schedule); !wrong.empty())
            throw CommonError(fmt::format("{}: is not complete: {}", where, wrong));
        if (const std::string wrong = deadlock(schedule, Sends::posted); !wrong.empty())
            throw CommonError(fmt::format("{}: deadlocks, however messages are sent: {}", where, wrong));
        const std::string waits = deadlock(schedule, Sends::blocking);
        const Timeline once = simulate(schedule, costs_.of(schedule));
        say("{}: {} ranks, {} micro-batches, {} chunk{} per rank; {}\n", schedule.name, schedule.stages,
            schedule.micro_batches, schedule.chunks, schedule.chunks == 1 ? "" : "s", costs_.text());
        say("complete:           yes\n");
        say("buffered sends:     all ranks reach the end\n");
        say("blocking sends:     {}\n", waits.empty() ? "all ranks reach the end" : "would deadlock: " + waits);
        say("bubble:             {:.1f}% by the clock ({:.4g}), {:.1f}% of the longest rank's own span ({:.4g})\n",
            100 * once.bubble(), once.total(), 100 * once.span_bubble(), once.longest_span());
        const Table ranks = ranks_table(schedule, once, costs_);
        say(ranks);
        const Schedule all = consecutive(schedule, steps_);
        const Timeline timeline = steps_ == 1 ? once : simulate(all, costs_.of(schedule));
        if (steps_ > 1) say(steps_table(schedule, costs_, steps_));
        constexpr int64_t kWidth = 84;
        say("\nletter{}, micro-batch, then blanks (F), - (B, I), ~ (W), = (on a critical path); dots: idle\n{}",
            schedule.chunks > 1 ? " (small: odd chunk)" : "", ascii_gantt(timeline, kWidth));

        write_.write(schedule_text(schedule));
        csv_.write(ranks.csv());
        spans_.write(spans_table(all, timeline).csv());
        if (draw_.given()) {
            const std::string title = fmt::format("{}: {}{}", schedule.name, costs_.text(),
                                                  steps_ > 1 ? fmt::format(", {} training steps", steps_) : "");
            draw_.write(draw(python, chrome_trace({{title, timeline}})));
        }
    }

    Flags flags_{"Check, simulate and draw a pipeline schedule, without running it"};
    std::string file_, name_;
    int64_t stages_ = 4, micro_batches_ = 8, virtual_stages_ = 0, steps_ = 1;
    SandboxCosts costs_;
    OptionalOutput write_{"--write"}, draw_{"--draw"}, csv_{"--csv"}, spans_{"--spans-csv"};
};

}  // namespace

int main(int argc, char** argv) {
    return run_program(argc, argv, [](int argc, char** argv) { Sandbox().run(argc, argv); });
}
