#include "08_3d_full/watch/inject.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "01_single_gpu/core/registry.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

namespace {

using Words = std::vector<std::string>;
const Words kKinds = {"kill",     "hang",   "stop", "slow", "nan", "wrong-sum", "wrong-group", "skip-collective",
                      "deadlock", "bitflip"};
const Words kKindsWithParam = {"nan", "wrong-sum", "wrong-group", "bitflip"};

// On standard error, of this rank.
template <class... Args>
void tell(fmt::format_string<Args...> text, Args&&... args) {
    fmt::print(stderr, "FAULT INJECTION: rank {}: {}\n", this_rank, fmt::format(text, std::forward<Args>(args)...));
}

std::string list_of(const Words& words) { return fmt::format("{}", fmt::join(words, ", ")); }

// A group whose next sum returns this rank's own numbers, once, without a word to the others.
class Forgetful : public Group {
  public:
    Forgetful(GroupPtr group, std::shared_ptr<bool> skip) : group_(std::move(group)), skip_(std::move(skip)) {}
    int rank() const override { return group_->rank(); }
    int size() const override { return group_->size(); }
    std::vector<double> sum(const std::vector<double>& x) const override {
        return std::exchange(*skip_, false) ? x : group_->sum(x);
    }
    std::vector<double> gather(const std::vector<double>& numbers) const override { return group_->gather(numbers); }
    void sum_tensor(Tensor x) const override { group_->sum_tensor(x); }
    void all_gather(Tensor full, const Tensor& part) const override { group_->all_gather(full, part); }
    void send(const Tensor& x, int to) const override { group_->send(x, to); }
    void recv(Tensor x, int from) const override { group_->recv(x, from); }

  private:
    GroupPtr group_;
    std::shared_ptr<bool> skip_;
};

// The parameter that the fault names; else the first matrix from a middle layer on: a row of the embedding is seldom
// used. allocated: that this rank holds.
const Param* parameter_of(const Fault& fault, Llama& model, bool allocated) {
    const std::vector<Param*> params = model.params();
    for (size_t i = 0; i < params.size(); ++i) {
        const Param* param = params[(params.size() / 2 + i) % params.size()];
        const bool fits = fault.param.empty() ? param->is_matrix() : param->name == fault.param;
        if (fits && (param->data || !allocated)) return param;
    }
    return nullptr;
}

}  // namespace

Inject::Inject(std::vector<Fault> faults, Trainer& trainer) : trainer_(trainer) {
    for (Fault& fault : faults) {
        say("FAULT INJECTION: {} of rank {} at step {}\n", fault.kind, fault.rank, fault.step);
        if (fault.rank == this_rank) mine_.push_back(std::move(fault));
    }
    for (const Fault& fault : mine_)
        if (fault.kind == "wrong-sum") leave_out(fault);
    if (faults.empty()) return;
    Groups& groups = trainer.groups;
    for (GroupPtr* group : {&groups.dp_cp, &groups.tp, &groups.pp}) {
        if ((*group)->size() == 1) continue;
        *group = std::make_shared<Forgetful>(*group, skip_);
        break;
    }
}

const Fault* Inject::strikes(const char* kind, int64_t step) const {
    for (const Fault& fault : mine_) {
        if (fault.kind != kind || fault.step != step) continue;
        tell("{} at step {}", kind, step);
        std::fflush(stderr);
        return &fault;
    }
    return nullptr;
}

void Inject::before_step(int64_t step) {
    begin_ = now_seconds();
    if (strikes("kill", step)) ::kill(getpid(), SIGKILL);
    if (strikes("stop", step)) ::kill(getpid(), SIGSTOP);
    if (strikes("hang", step))
        while (true) std::this_thread::sleep_for(std::chrono::hours(1));
    slow_ = strikes("slow", step) || slow_;
    left_out_ = strikes("wrong-sum", step) || left_out_;
    *skip_ = strikes("skip-collective", step);
}

void Inject::gradients_ready(int64_t step) {
    if (const Fault* fault = strikes("nan", step)) put_nan(*fault);
    for (const Fault& fault : mine_) {
        if (fault.kind != "wrong-group" || fault.step > step) continue;
        if (fault.step == step) strikes("wrong-group", step);
        for (const Param* param : trainer_.model.params()) {
            if (!param->over_ep || (!fault.param.empty() && param->name != fault.param)) continue;
            for (Tensor& part : trainer_.store->gradient_parts(*param))  // of the sum, what this rank has
                scale(part, double(param->local.rows) / double(param->global_shape[0]));
        }
    }
    if (strikes("deadlock", step)) trainer_.groups.tp->sum(0.0);
    if (slow_) std::this_thread::sleep_for(std::chrono::duration<double>(now_seconds() - begin_));
}

bool Inject::after_step(const StepReport& report) {
    if (const Fault* fault = strikes("bitflip", report.step)) flip_bit(*fault);
    return true;
}

// Into an element that this rank reduces and counts in the norm.
void Inject::put_nan(const Fault& fault) {
    bool done = false;
    trainer_.store->for_each_state([&](const Segment& segment, const char*, Tensor&) {
        if (done || !segment.counts() || segment.data.size() == 0) return;
        if (!fault.param.empty() && segment.param->name != fault.param) return;
        const std::vector<Tensor> parts = trainer_.store->gradient_parts(*segment.param);
        if (parts.empty()) return;
        const bool full = parts[0].size() == segment.param->local.size();
        Tensor element = parts[0].element_slice(full ? segment.offset : 0, {1});
        fill(element, std::numeric_limits<double>::quiet_NaN());
        tell("step {}: the gradient of {} has a NaN", fault.step, segment.param->name);
        done = true;
    });
    if (!done) tell("no gradient is counted here");
}

// Its gradient is set to 0 after each backward pass of the unit, before the store reduces it.
void Inject::leave_out(const Fault& fault) {
    const Param* param = parameter_of(fault, trainer_.model, false);
    if (!param) return tell("it has no such parameter");
    for (Unit* unit : trainer_.model.units_run()) {
        const std::vector<Param*>& own = (unit->owner ? unit->owner : unit)->params;
        if (std::find(own.begin(), own.end(), param) == own.end()) continue;
        // The innermost wrapper: what it records runs before what the store has recorded.
        unit->wrappers.push_back([this, param](Tape& tape, const Var& x, const Unit::Body& body) {
            tape.record_wgrad([this, param] {
                if (!left_out_ || !param->grad) return;
                Tensor grad = param->grad;
                fill(grad, 0);
            });
            return body(tape, x);
        });
    }
    tell("from step {} on, its gradient of {} is missing", fault.step, param->name);
}

void Inject::flip_bit(const Fault& fault) {
    const Param* param = parameter_of(fault, trainer_.model, true);
    Tensor weight = param ? param->data : Tensor();
    if (!weight)  // ZeRO-3: a shard
        trainer_.store->for_each_state([&](const Segment& segment, const char*, Tensor&) {
            const bool wanted = fault.param.empty() || segment.param->name == fault.param;
            if (!weight && wanted && segment.data.size() > 0) weight = segment.data, param = segment.param;
        });
    if (!weight) return tell("it has no such weight");
    const int64_t element = weight.size() / 2;
    Tensor there = weight.element_slice(element, {1}), here({1}, weight.dtype(), Device::cpu, Memory::workspace);
    copy(here, there);
    const double before = read(here)[0];
    const int bit = weight.dtype() == DType::f64 ? 51 : weight.dtype() == DType::bf16 ? 6 : 22;
    static_cast<uint8_t*>(here.raw())[bit / 8] ^= uint8_t(1 << bit % 8);  // little-endian
    copy(there, here);
    tell("after step {}: {}, element {} of this rank's: {} becomes {}", fault.step, param->name, element, before,
         read(here)[0]);
}

void add_inject_flag(Flags& flags, std::string& text) {
    flags.group("Faults");
    flags
        .add("--inject", text,
             "KIND:RANK:STEP,...: a rank fails at a step, for drills; kinds: " + list_of(kKinds) + "; " +
                 list_of(kKindsWithParam) + " may name a parameter: KIND:RANK:STEP:PARAMETER")
        .default_text("");
}

std::vector<Fault> parse_faults(const std::string& text, const CommOptions& comm, const TrainOptions& options,
                                const Mesh& mesh) {
    std::vector<Fault> faults;
    if (text.empty()) return faults;
    if (comm.backend == "fake")
        usage_error("--inject {}: not supported with --comm fake, whose other ranks do not exist", text);
    const auto number = [](const std::string& word) -> int64_t {
        return integer_from(0).problem(word).empty() ? std::stoll(word) : -1;
    };
    const int64_t ranks = mesh.size();
    for (const std::string& item : items_of(text)) {
        const std::vector<std::string> parts = items_of(item, ':');
        const std::string& kind = parts[0];
        if (std::ranges::count(kKinds, kind) == 0)
            usage_error("--inject {}: unknown kind of fault; kinds: {}", item, list_of(kKinds));
        if (parts.size() < 3 || parts.size() > 4)
            usage_error("--inject {}: must be KIND:RANK:STEP, as in kill:0:3", item);
        Fault fault{kind, number(parts[1]), number(parts[2])};
        if (fault.rank < 0 || fault.rank >= ranks) usage_error("--inject {}: valid ranks are 0 to {}", item, ranks - 1);
        if (fault.step < 1 || fault.step > options.steps)
            usage_error("--inject {}: valid steps are 1 to {}", item, options.steps);
        if (parts.size() == 4) {
            fault.param = parts[3];
            if (std::ranges::count(kKindsWithParam, kind) == 0)
                usage_error("--inject {}: only {} take a parameter (try {}:{}:{})", item, list_of(kKindsWithParam),
                            kind, parts[1], parts[2]);
            Llama model(options.model, options.llama());
            const std::vector<Param*> params = model.params();
            const auto found = std::ranges::find(params, fault.param, &Param::name);
            if (found == params.end())
                usage_error("--inject {}: the model has no parameter \"{}\" (its first is {}, its last {})", item,
                            fault.param, params.front()->name, params.back()->name);
            if (kind == "wrong-group" && !(*found)->over_ep)
                usage_error("--inject {}: \"{}\" is not divided over --ep", item, fault.param);
        }
        if (kind == "wrong-group" && mesh.ep == 1) usage_error("--inject {}: needs --ep above 1 (try --ep 2)", item);
        if (kind == "skip-collective" && ranks == 1) usage_error("--inject {}: a single rank has no collectives", item);
        if (kind != "deadlock") {
            faults.push_back(fault);
            continue;
        }
        if (mesh.tp < 2 || mesh.dp * mesh.cp < 2)
            usage_error("--inject {}: takes two groups that wait for each other (try --tp 2 --dp 2)", item);
        const auto parity = [](const Mesh::Coordinates& at) { return (at.dp + at.cp + at.tp) % 2; };
        const Mesh::Coordinates coordinates = mesh.coordinate(fault.rank);
        for (fault.rank = 0; fault.rank < ranks; ++fault.rank)
            if (const Mesh::Coordinates at = mesh.coordinate(fault.rank);
                at.pp == coordinates.pp && parity(at) == parity(coordinates))
                faults.push_back(fault);
    }
    return faults;
}

}  // namespace train70b
