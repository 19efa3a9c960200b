#include "08_3d_full/checkpoint/elastic.h"

#include <sys/socket.h>

#include <set>
#include <thread>
#include <utility>

#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

using nlohmann::json;

void add_elastic_flags(Flags& flags, ElasticOptions& o) {
    flags.group("Elastic replicas");
    flags.add_switch("--elastic", o.on, "this run is one of several replicas, which may leave and come back");
    flags.add("--lighthouse", o.lighthouse, "HOST:PORT of 08_3d_full/checkpoint/lighthouse.py").default_text("");
    flags.add("--replica", o.replica, "the number of this replica", integer_from(0)).default_text("");
    flags.add("--elastic-timeout", o.timeout,
              "seconds of silence after which a replica is left out; in a sum, half of them",
              real_number(0, 1e6, false));
}

void check_elastic(const ElasticOptions& o, const Program& p, const ParallelConfig& config) {
    const bool at = !o.lighthouse.empty(), numbered = o.replica >= 0;
    if (!o.on && (at || numbered)) usage_error("--lighthouse, --replica: need --elastic on");
    if (!o.on) return;
    if (!at || !numbered)
        usage_error("--elastic on: needs --lighthouse HOST:PORT, where lighthouse.py runs, and --replica N");
    if (p.comm.backend == "fake") usage_error("--elastic on: not with --comm fake, whose other ranks do not exist");
    if (config.zero.stage > 0 && config.mesh.dp * config.mesh.cp == 1)
        usage_error(
            "--elastic on: --zero {} shards states over the data-parallel ranks of a replica, never over replicas, and "
            "this one has a single one (try --zero 0, or --dp 2)",
            config.zero.stage);
    if (!(o.timeout < p.comm.timeout))
        usage_error("--elastic-timeout {}: must be below --comm-timeout, {}", o.timeout, p.comm.timeout);
}

namespace {
// The data-parallel ranks of all replicas, where the targets of a step are counted.
struct Targets : Group {
    Targets(const Group& own, TcpBackend& peers) : own(own), peers(peers) {}
    std::vector<double> sum(const std::vector<double>& local) const override {
        const std::vector<double> sum = own.sum(local);
        const Tensor x = upload(sum, {int64_t(sum.size())}, DType::f64, Device::cpu, Memory::comm);
        peers.all_reduce(x, Reduce::sum);
        return read(x);
    }
    const Group& own;
    TcpBackend& peers;
};
}  // namespace

Elastic::Elastic(const ElasticOptions& options, Trainer& trainer, Zero& store, const Comm& world,
                 const ParallelConfig& config, const std::optional<Manifest>& start)
    : options_(options),
      trainer_(trainer),
      store_(store),
      world_(world),
      config_(config),
      loop_(trainer.loop),
      own_dp_(trainer.groups.dp),
      own_dp_cp_(trainer.groups.dp_cp),
      steps_done_(start ? start->step : 0) {
    if (!std::ranges::all_of(trainer.step_states, [](StepState* state) { return dynamic_cast<SkipStep*>(state); }))
        usage_error(
            "--elastic on: not with state that ranks sum after the update, when a step cannot be done again: --fp8 "
            "delayed, the load of a sparse model, or the loss scale of --dtype fp16");
    trainer.loop = this;
    together([&] {
        try {
            peers_.emplace(options.lighthouse, options.timeout / 2);
            const double until = now_seconds() + options.timeout / 2;  // it may start at the same time
            while (this_rank == 0 && !lighthouse_) try {
                    lighthouse_ = connect_to(options.lighthouse, options.timeout / 2);
                } catch (const std::runtime_error&) {
                    if (now_seconds() > until) throw;
                    std::this_thread::sleep_for(std::chrono::milliseconds(100));
                }
        } catch (const std::runtime_error& error) {
            usage_error("--lighthouse {} (lighthouse.py prints what it must be)", error.what());
        }
    });
}

// ---- the lighthouse -------------------------------------------------------------------------------------------------

int64_t Elastic::first_step() {
    const std::vector<std::string> addresses = gather_words(peers_->address());
    const TrainOptions& o = trainer_.options;
    // What all replicas have in common.
    const json settings({layout_json(config_.mesh), hf_config(o.model, o.llama().dtype), fingerprint(trainer_.data),
                         o.seed, o.steps, o.global_batch, o.micro_batch, o.seq_len, o.lr, config_.optimizer,
                         o.weight_decay, o.beta1, o.beta2, o.eps, o.clip, o.skip_step, o.multi_token_weight});
    const auto others_start = watchdog->pause();
    next_ = ask({{"replica", options_.replica},
                 {"settings", settings.dump()},
                 {"step", steps_done_},
                 {"addresses", addresses},
                 {"timeout", options_.timeout}});
    check_divisions(next_.at("replicas"));
    return next_.at("step");
}

void Elastic::finish() {
    if (trainer_.steps_done() >= trainer_.last_step()) return tell({{"over", true}});
    lighthouse_.reset();  // stopped by a signal: it leaves, and the others go on
    peers_.reset();
}

void Elastic::check_divisions(int64_t replicas) const {
    const TrainOptions& o = trainer_.options;
    std::set<int64_t> samples;  // of a step: several with --batch-ramp
    for (int64_t step = 1; step <= o.steps; ++step) samples.insert(trainer_.batches.sizes().samples(step));
    for (const int64_t batch : samples) {
        const int64_t parts = batch / (o.micro_batch * own_dp_->size());
        if (parts < replicas)
            usage_error("--global-batch {}: a replica has {} micro-batches at a time, so there is work for {} of {}",
                        batch, own_dp_->size(), parts, replicas);
        for (int64_t n = 1; n <= replicas; ++n)
            for (const int64_t count : {parts / n, (parts + n - 1) / n})
                pipeline_schedule(config_.pipeline, config_.mesh.pp, count);
    }
}

void Elastic::tell(const json& line) const {
    const std::string text = line.dump() + "\n";
    if (this_rank == 0) send(*lighthouse_, text.data(), text.size(), MSG_NOSIGNAL);  // a failure shows in ask()
}

json Elastic::ask(const json& line) const {
    tell(line);
    std::string answer;
    char bytes[4096];
    while (this_rank == 0 && !answer.ends_with('\n')) {
        const ssize_t count = recv(*lighthouse_, bytes, sizeof bytes, 0);
        if (count <= 0)
            throw std::runtime_error(
                fmt::format("replica {} was left out, as the lighthouse at {} says, or that has ended",
                            options_.replica, options_.lighthouse));
        answer.append(bytes, size_t(count));
    }
    std::vector<double> letters(size_t(world_.max(double(answer.size()))));
    std::ranges::copy(answer, letters.begin());
    letters = world_.sum(letters);
    const json said = json::parse(std::string(letters.begin(), letters.end()));
    if (!said.contains("over")) return said;
    say("the other replicas have finished\n");
    throw EarlyEnd{0};
}

bool Elastic::vote() {
    const bool complete = world_.sum(peers_->failure().empty() ? 0.0 : 1.0) == 0;
    const auto others_vote = watchdog->pause();
    next_ = ask({{"complete", complete}, {"why", peers_->failure()}});
    return next_.at("commit");
}

void Elastic::meet() {
    const auto others_heal = watchdog->pause();
    for (connect(); !next_.at("heal").empty(); connect()) next_ = ask({{"complete", heal()}});
    const int64_t own = own_dp_->size();
    trainer_.groups.dp = std::make_shared<Coordinate>(place_of(options_.replica) * own + own_dp_->rank(),
                                                      int64_t(replicas_.size()) * own);
    trainer_.groups.dp_cp = std::make_shared<Targets>(*own_dp_cp_, *peers_);
}

void Elastic::connect() {
    if (std::exchange(generation_, next_.at("generation")) == next_.at("generation")) return;
    const std::vector<int64_t> before = std::exchange(replicas_, {});
    std::vector<std::string> addresses;
    for (const auto& [replica, ranks] : next_.at("members").get<std::vector<std::pair<int64_t, json>>>()) {
        replicas_.push_back(replica);
        addresses.push_back(ranks.at(size_t(world_.rank())));
    }
    peers_->connect(addresses, place_of(options_.replica), generation_);
    changed_ = true;
    if (replicas_ != before)
        trainer_.note(fmt::format("          from step {} on: replicas {}", next_.at("step").get<int64_t>(),
                                  json(replicas_).dump()),
                      {{"event", "replicas"}, {"step", next_.at("step")}, {"replicas", replicas_}});
}

bool Elastic::heal() {
    const double begin = now_seconds();
    bool receives = false;
    int64_t bytes = 0;
    for (const auto& [to, from] : next_.at("heal").get<std::vector<std::pair<int64_t, int64_t>>>()) {
        const bool sends = from == options_.replica;
        if (!sends && to != options_.replica) continue;
        receives = receives || !sends;
        const int peer = place_of(sends ? to : from);
        store_.for_each_state([&](const Segment&, const char*, Tensor& state) {
            peers_->exchange(sends ? state : Tensor(), peer, sends ? Tensor() : state, peer);
            bytes += state.bytes();
        });
        for (StepState* state : trainer_.step_states) {
            StepState::Rows rows = state->rows();
            const Tensor x = upload({rows.values.begin(), rows.values.end()}, {int64_t(rows.values.size())}, DType::f32,
                                    Device::cpu, Memory::comm);
            peers_->exchange(sends ? x : Tensor(), peer, sends ? Tensor() : x, peer);
            if (!sends) std::ranges::copy(read(x), rows.values.begin());
            if (!sends) state->restore(rows);
        }
    }
    if (world_.sum(peers_->failure().empty() ? 0.0 : 1.0) > 0) return false;
    if (!receives) return true;
    store_.states_changed();
    trainer_.note(fmt::format("          weights and states received: {} a rank in {:.2f} s",
                              human_bytes(double(bytes)), now_seconds() - begin),
                  {{"event", "healed"}, {"step", next_.at("step")}, {"bytes", bytes}});
    return true;
}

// ---- a step ---------------------------------------------------------------------------------------------------------

void Elastic::before_step(int64_t step) {
    meet();
    if (std::exchange(changed_, false) && !trainer_.data.is_text())
        trainer_.batches.start_reading(*trainer_.groups.dp, step, trainer_.last_step());
}

void Elastic::gradients_ready(int64_t step) {
    for (sum_over_replicas(); !vote(); sum_over_replicas()) repeat(step);
    trainer_.groups.dp_cp = own_dp_cp_;
}

void Elastic::sum_over_replicas() {
    const Span span("replicas", "comm");
    for (const Tensor& gradients : store_.reduced_gradients()) peers_->all_reduce(gradients, Reduce::sum);
    peers_->all_reduce(loss_, Reduce::sum);
}

// As Trainer::step begins.
void Elastic::repeat(int64_t step) {
    changed_ = true;
    before_step(step);
    trainer_.batches.begin_step(*trainer_.groups.dp, *trainer_.groups.dp_cp, step);
    store_.begin_step(trainer_.micro_batches(step));
    Tensor loss = loss_;
    copy(loss, loop_->forward_backward(
                   {trainer_.micro_batches(step), [&](int64_t index) { return trainer_.micro_batch(step, index); }}));
    store_.finish_gradients();
    sum_partial_gradients(trainer_.model, store_);
}

void Elastic::complete(StepReport& report) {
    if (report.mfu) *report.mfu *= double(own_dp_->size()) / double(trainer_.groups.dp->size());
    report.comm_bytes["replicas.all_reduce"] = peers_->take_sent();
    trainer_.groups.dp = own_dp_;
}

}  // namespace train70b
