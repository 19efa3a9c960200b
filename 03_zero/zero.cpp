#include "03_zero/zero.h"

#include <cmath>
#include <fstream>
#include <numeric>
#include <tuple>
#include <utility>

namespace train70b {

namespace {

// A copy between the device and the host, beside the computation where there is a device. On the CPU: at once.
class HostCopy {
  public:
    HostCopy(Tensor to, const Tensor& from) {
#if TRAIN70B_CUDA
        if (to.device() == Device::cuda || from.device() == Device::cuda) {
            const CopyKind kind = from.device() == Device::cuda ? CopyKind::to_host : CopyKind::to_device;
            cuda_ = std::make_unique<CudaCopy>(to.raw(), from.raw(), from.bytes(), kind);
            kept_ = {to, from};
            return;
        }
#endif
        copy(to, from);
    }
    void host_waits() {
#if TRAIN70B_CUDA
        if (cuda_) cuda_->host_waits();
#endif
    }
    void device_waits() {
#if TRAIN70B_CUDA
        if (cuda_) cuda_->stream_waits();
#endif
    }

  private:
#if TRAIN70B_CUDA
    std::unique_ptr<CudaCopy> cuda_;
    std::vector<Tensor> kept_;
#endif
};

int64_t available_host_memory() {  // bytes; of Linux: what can be had without swapping
    std::ifstream file("/proc/meminfo");
    std::string name, unit;
    for (int64_t kib = 0; file >> name >> kib;) {
        std::getline(file, unit);
        if (name == "MemAvailable:") return kib * 1024;
    }
    return INT64_MAX;
}

}  // namespace

void add_zero_flags(Flags& flags, int64_t& dp, ZeroOptions& o) {
    flags.group("Communication");
    flags.add("--dp", dp, "data-parallel ranks [what the ranks leave]", whole_number_from(1)).default_text("");
    flags
        .add_word(
            "--zero", [&o](const std::string& stage) { o.stage = std::stoi(stage); },
            "stage: what is sharded; 1 optimizer states, 2 and gradients, 3 and parameters",
            one_of({"0", "1", "2", "3"}))
        .default_text(std::to_string(o.stage));
    flags.add("--hybrid-shard", o.hybrid_shard, "ranks of a shard group, replicas across [all]", whole_number_from(1))
        .default_text("");
    flags.add("--prefetch", o.prefetch, "units gathered ahead (--zero 3)", whole_number_from(0));
    flags
        .add_word(
            "--offload",
            [&o](const std::string& what) {
                o.offload = what == "none" ? Offload::none : what == "optimizer" ? Offload::optimizer : Offload::all;
            },
            "what lives in the host's memory", one_of({"none", "optimizer", "all"}))
        .default_text("none");
    flags.add("--bucket-mb", o.bucket_mb, "MiB of gradients that leave together, in whole units", real_number(0, 1e6))
        .default_text("25; from --zero 2 on 0: each unit by itself");
    flags.add_switch("--overlap", o.overlap, "reduce gradients behind the backward pass");
}

void check_zero(const ZeroOptions& o, const TrainOptions& training, int64_t data_ranks, int64_t ranks_on_node,
                std::optional<double> moments) {
    if (o.hybrid_shard > 0 && o.stage == 0)
        usage_error("--hybrid-shard {}: --zero 0 shards nothing; --zero 1, 2 or 3 would", o.hybrid_shard);
    if (o.hybrid_shard > 0 && data_ranks % o.hybrid_shard != 0)
        usage_error("--hybrid-shard {} does not divide the {} ranks that share parameters (--dp, and --cp); {} would",
                    o.hybrid_shard, data_ranks, std::gcd(o.hybrid_shard, data_ranks));
    if (o.offload != Offload::none && o.stage == 0)
        usage_error("--offload: each of {} ranks would keep all states on the host; add --zero 1, 2 or 3", data_ranks);
    if (o.offload == Offload::all && o.stage < 3)
        usage_error("--offload all: moves the shards of --zero 3; with --zero {} there is --offload optimizer",
                    o.stage);
    if (o.offload == Offload::none || training.dry_run) return;
    const int64_t shards = o.hybrid_shard > 0 ? o.hybrid_shard : data_ranks;
    const Llama::Options types = training.llama();
    const double states =
        moments ? *moments + double(master_bytes(types.dtype)) : double(AdamW::state_bytes(types.dtype));
    const int64_t each = int64_t(double(training.model.parameters() / shards + 1) *
                                 (double(size_of(types.dtype) + size_of(types.grad_dtype)) + states));
    const int64_t here = each * std::min(ranks_on_node, data_ranks), free = available_host_memory();
    if (here > free)
        usage_error(
            "--offload {}: needs {} of host memory on this node ({} per rank), and {} are available; more ranks on "
            "more nodes, or --offload none, would do",
            o.offload == Offload::all ? "all" : "optimizer", human_bytes(double(here)), human_bytes(double(each)),
            human_bytes(double(free)));
}

Zero::Zero(Llama& model, const Comm& data_ranks, const ZeroOptions& options, const AdamW::Hyper& hyper)
    : make_optimizer(AdamW::maker(hyper)), model_(model), ranks_(data_ranks), shards_(data_ranks), options_(options) {
    if (options_.bucket_mb < 0) options_.bucket_mb = keeps_grads() ? 25 : 0;
    if (const int64_t group = options_.hybrid_shard; group > 0 && group < data_ranks.size()) {
        shards_ = data_ranks.split([group](int rank) { return int(rank / group); }, "dp_shard");
        replicas_ = data_ranks.split([group](int rank) { return int(rank % group); }, "dp_replica");
    }
    for (Unit* unit : model.units()) {
        const int64_t size = total_size(unit->params), N = shards_.size();
        flats_.push_back({.unit = unit, .size = size, .padded = (size + N - 1) / N * N});
    }
    for (size_t i = 0; i < flats_.size(); ++i) {
        auto& levels = flats_[i].unit->around;
        levels.insert(levels.begin(),
                      [this, i](Tape& tape, const Var& x, const Unit::Body& body) { return around(i, tape, x, body); });
    }
    model.allocate_params = [this](uint64_t seed) { allocate_params(seed); };
    model.allocate_grads = [this] { allocate_grads(); };
    model.write_params = [this](Unit& unit, const std::function<void()>& write) { write_params(unit, write); };
}

// ---- who holds what -------------------------------------------------------------------------------------------------

Tensor Zero::place_of_shard(const Flat& flat, const Tensor& whole) const {
    return whole.element_slice(shards_.rank() * shard_size(flat), {shard_size(flat)});
}

std::vector<Zero::Place> Zero::places(const Flat& flat, int64_t shard) const {
    std::vector<Place> list;
    const int64_t begin = shard * shard_size(flat), end = begin + shard_size(flat);
    int64_t param_begin = 0, rest = 0;
    for (Param* param : flat.unit->params) {
        const int64_t param_end = param_begin + param->local.size();
        const int64_t from = std::max(begin, param_begin), to = std::min(end, param_end);
        if (from < to) {
            list.push_back({param, from - param_begin, from - begin, rest, to - from});
            if (cast && !cast->takes(*param)) rest += to - from;
        }
        param_begin = param_end;
    }
    return list;
}

// The parts of the unit's parameters that lie in a shard. params, grads: the shard's elements; either may be empty.
std::vector<Segment> Zero::segments(const Flat& flat, int64_t shard, const Tensor& params, const Tensor& grads) const {
    std::vector<Segment> list;
    for (const auto& [param, in_param, in_shard, in_rest, size] : places(flat, shard)) {
        const auto slice = [from = in_shard, count = size](const Tensor& x) {
            return x ? x.element_slice(from, {count}) : Tensor();
        };
        list.push_back({slice(params), slice(grads), param->is_matrix(), param->replica == 0, param->place(in_param),
                        param->key(0)});
    }
    return list;
}

void Zero::allocate_params(uint64_t seed) {
    const auto& [dtype, grad_dtype, device] =
        std::tie(model_.options.dtype, model_.options.grad_dtype, model_.options.device);
    for (Flat& flat : flats_) {
        CHECK(flat.size == total_size(flat.unit->params), "the model was narrowed after this was made");
        if (keeps_params()) {
            flat.params = Tensor({flat.padded}, dtype, device, Memory::params);
            fill(flat.params, 0);
            bind_data(flat.unit->params, flat.params.element_slice(0, {flat.size}));
            for (Param* param : flat.unit->params) initialise(*param, seed, 0, param->data);
            flat.param_shard = place_of_shard(flat, flat.params);
            continue;
        }
        // Only this rank's part of each parameter is ever created.
        Tensor shard({shard_size(flat)}, dtype, device,
                     options_.offload == Offload::all ? Memory::workspace : Memory::params);
        fill(shard, 0);
        for (const auto& [param, in_param, in_shard, in_rest, size] : places(flat, shards_.rank())) {
            Tensor part = shard.element_slice(in_shard, {size});
            initialise(*param, seed, in_param, part);
        }
        flat.param_shard = shard;
        if (options_.offload == Offload::all) {
            flat.host_params = Tensor({shard_size(flat)}, dtype, host(), Memory::host);
            copy(flat.host_params, shard);
            flat.param_shard = Tensor();
        }
    }
}

void Zero::allocate_grads() {
    for (Flat& flat : flats_) {
        const auto shard = [&](Device device, Memory kind) {
            Tensor x({shard_size(flat)}, model_.options.grad_dtype, device, kind);
            fill(x, 0);
            return x;
        };
        if (keeps_grads()) {
            flat.grads = Tensor({flat.padded}, model_.options.grad_dtype, model_.options.device, Memory::grads);
            fill(flat.grads, 0);
            bind_grads(flat.unit->params, flat.grads.element_slice(0, {flat.size}));
            flat.grad_shard = place_of_shard(flat, flat.grads);
        } else if (options_.offload != Offload::all) {
            flat.grad_shard = shard(model_.options.device, Memory::grads);
        }
        if (offloads()) flat.host_grads = shard(host(), Memory::host);
    }
}

void Zero::write_params(Unit& unit, const std::function<void()>& write) {
    for (Flat& flat : flats_) {
        if (flat.unit != &unit) continue;
        if (keeps_params()) return write();
        Tensor whole({flat.padded}, model_.options.dtype, model_.options.device, Memory::workspace);
        fill(whole, 0);
        bind_data(unit.params, whole.element_slice(0, {flat.size}));
        write();
        bind_data(unit.params, Tensor());
        Tensor& shard = flat.host_params ? flat.host_params : flat.param_shard;
        copy(shard, place_of_shard(flat, whole));
    }
}

void Zero::begin() {
    for (Flat& flat : flats_) {
        if (offloads()) {
            if (!flat.host_params) {
                flat.host_params = Tensor({shard_size(flat)}, model_.options.dtype, host(), Memory::host);
                copy(flat.host_params, flat.param_shard);
            }
            flat.optimizer =
                make_optimizer(segments(flat, shards_.rank(), flat.host_params, flat.host_grads), Memory::host);
        } else if (options_.stage == 0) {
            flat.optimizer = make_optimizer(whole_segments(flat.unit->params), Memory::optimizer);
        } else {
            flat.optimizer =
                make_optimizer(segments(flat, shards_.rank(), flat.param_shard, flat.grad_shard), Memory::optimizer);
        }
    }
    params_changed();
}

// ---- parameters that travel in another dtype ------------------------------------------------------------------------

bool Zero::casts(const Flat& flat) const {
    return cast && !keeps_params() && options_.offload != Offload::all &&
           std::any_of(flat.unit->params.begin(), flat.unit->params.end(),
                       [this](const Param* param) { return cast->takes(*param); });
}

void Zero::params_changed() {
    if (!cast || std::none_of(flats_.begin(), flats_.end(), [this](const Flat& flat) { return casts(flat); })) return;
    std::vector<Piece> pieces;
    for (const Flat& flat : flats_)
        if (casts(flat))
            for (const Place& place : places(flat, shards_.rank()))
                if (cast->takes(*place.param))
                    pieces.push_back({place.param, flat.param_shard.element_slice(place.in_shard, {place.size})});
    cast->changed(pieces, shards_, model_.options.device);
}

// All elements have a place among the codes; those that are not taken travel in a second message, in their own dtype.
void Zero::start_gathering_codes(Flat& flat) {
    flat.params = Tensor({flat.padded}, cast->dtype, model_.options.device, Memory::workspace);
    const Tensor codes = place_of_shard(flat, flat.params);
    int64_t most = 0;  // not taken, of any shard
    for (int64_t shard = 0; shard < shards_.size(); ++shard) {
        int64_t count = 0;
        for (const Place& place : places(flat, shard))
            if (!cast->takes(*place.param)) count += place.size;
        most = std::max(most, count);
    }
    flat.rest = Tensor({shards_.size(), most}, model_.options.dtype, model_.options.device, Memory::workspace);
    const Tensor own = flat.rest.row_slice(shards_.rank(), shards_.rank() + 1);
    for (const Place& place : places(flat, shards_.rank())) {
        const Tensor piece = flat.param_shard.element_slice(place.in_shard, {place.size});
        if (cast->takes(*place.param)) {
            cast->encode(codes.element_slice(place.in_shard, {place.size}), piece, *place.param);
        } else {
            Tensor to = own.element_slice(place.in_rest, {place.size});
            copy(to, piece);
        }
    }
    flat.gathering = shards_.all_gather(flat.params, codes);
    if (most > 0) flat.gathering_rest = shards_.all_gather(flat.rest, own);
}

// The parameters that no cast takes, put together from the shards; one behind another, for a layer of several weights.
void Zero::bind_rest(Flat& flat) {
    flat.gathering_rest.wait();
    std::vector<Param*> rest;
    for (Param* param : flat.unit->params)
        if (!cast->takes(*param)) rest.push_back(param);
    bind_data(rest, Tensor({total_size(rest)}, flat.rest.dtype(), flat.rest.device(), Memory::workspace));
    for (int64_t shard = 0; shard < shards_.size(); ++shard)
        for (const auto& [param, in_param, in_shard, in_rest, size] : places(flat, shard)) {
            if (cast->takes(*param)) continue;
            Tensor to = param->data.element_slice(in_param, {size});
            copy(to, flat.rest.row_slice(shard, shard + 1).element_slice(in_rest, {size}));
        }
    flat.rest = Tensor();
}

// ---- around a unit's forward and backward pass ----------------------------------------------------------------------

Var Zero::around(size_t i, Tape& tape, const Var& x, const Unit::Body& body) {
    Flat& flat = flats_[i];
    if (!keeps_params()) gather(i, +1);
    tape.record_weights([this, i] { unit_is_ready(i); });
    Var y = body(tape, x);
    if (!keeps_params()) no_longer_needed(flat);
    if (!keeps_grads())
        tape.record([this, i, &flat] {
            if (!keeps_params()) gather(i, -1);
            make_room_for_grads(flat);
        });
    return y;
}

void Zero::start_gathering(Flat& flat) {
    if (flat.params) return;
    if (casts(flat)) {
        start_gathering_codes(flat);
    } else {
        flat.params = Tensor({flat.padded}, model_.options.dtype, model_.options.device, Memory::workspace);
        Tensor shard = flat.param_shard;
        if (!shard) {  // on the host: up first, into its place
            shard = place_of_shard(flat, flat.params);
            HostCopy(shard, flat.host_params).device_waits();
        }
        flat.gathering = shards_.all_gather(flat.params, shard);
    }
    most_gathered_ = std::max(most_gathered_, ++gathered_);
}

void Zero::gather(size_t i, int direction) {
    Flat& flat = flats_[i];
    start_gathering(flat);
    for (int64_t ahead = 1; ahead <= std::min(options_.prefetch, int64_t(flats_.size())); ++ahead) {
        const int64_t next = int64_t(i) + direction * ahead;
        if (next >= 0 && next < int64_t(flats_.size())) start_gathering(flats_[next]);
    }
    flat.gathering.wait();
    if (flat.users++ > 0) return;
    bind_data(flat.unit->params, flat.params.element_slice(0, {flat.size}));
    if (casts(flat)) bind_rest(flat);
}

// A pipeline may run another forward pass between a backward pass and its weight halves, which may need norm weights
// (to make their input again): the last one that needs the parameters frees them.
void Zero::no_longer_needed(Flat& flat) {
    if (--flat.users == 0) free_params(flat);
}

void Zero::free_params(Flat& flat) {
    bind_data(flat.unit->params, Tensor());
    flat.params = flat.rest = Tensor();
    --gathered_;
}

// A pipeline may begin with another micro-batch's backward pass before this one's weight halves have been run, or
// before this one's gradients have left: then both sum up in one place.
void Zero::make_room_for_grads(Flat& flat) {
    ++flat.unfinished;
    std::erase(ready_, &flat);
    if (flat.grads) return;
    flat.grads = Tensor({flat.padded}, model_.options.grad_dtype, model_.options.device, Memory::workspace);
    fill(flat.grads, 0);
    bind_grads(flat.unit->params, flat.grads.element_slice(0, {flat.size}));
}

void Zero::unit_is_ready(size_t i) {
    Flat& flat = flats_[i];
    const bool last_pass = ++flat.passes == options_.micro_batches;
    if (!keeps_params()) no_longer_needed(flat);
    if (keeps_grads() && !last_pass) return;  // sums up where it is
    if (!keeps_grads() && --flat.unfinished > 0) return;
    ready_.push_back(&flat);
    if (keeps_grads() && !options_.overlap) return;  // until finish()
    int64_t bytes = 0;
    for (const Flat* waiting : ready_) bytes += waiting->grads.bytes();
    if (double(bytes) >= options_.bucket_mb * (1 << 20) || i == 0) reduce_ready_units();
}

void Zero::reduce_ready_units() {
    for (; !ready_.empty(); ready_.pop_front()) start_reduction(*ready_.front());
}

void Zero::start_reduction(Flat& flat) {
    Reduction reduction{.flat = &flat, .whole = flat.grads, .first = !std::exchange(flat.reduced, true)};
    if (options_.stage == 0) {
        reduction.work = shards_.all_reduce(flat.grads);
    } else {
        // The first pass of a step lands in the shard itself; later ones in their place in the whole, to be added.
        const bool direct = keeps_grads() || (reduction.first && flat.grad_shard);
        reduction.part = direct ? flat.grad_shard : place_of_shard(flat, flat.grads);
        reduction.work = shards_.reduce_scatter(reduction.part, flat.grads);
    }
    if (!keeps_grads()) {
        bind_grads(flat.unit->params, Tensor());
        flat.grads = Tensor();         // the reduction holds on to it
        while (!under_way_.empty()) {  // one at a time: each holds a unit's gradients
            settle(under_way_.front());
            under_way_.pop_front();
        }
    }
    if (options_.overlap) {
        under_way_.push_back(std::move(reduction));
    } else {
        settle(reduction);
    }
}

void Zero::settle(Reduction& reduction) {
    Flat& flat = *reduction.flat;
    reduction.work.wait();
    if (keeps_grads() || (flat.grad_shard && reduction.part.same_memory(flat.grad_shard))) return;
    if (flat.grad_shard) return add(flat.grad_shard, flat.grad_shard, reduction.part);
    if (reduction.first) return HostCopy(flat.host_grads, reduction.part).host_waits();
    Tensor sum = Tensor::like(reduction.part, Memory::workspace);
    HostCopy(sum, flat.host_grads).device_waits();
    add(sum, sum, reduction.part);
    HostCopy(flat.host_grads, sum).host_waits();
}

void Zero::finish() {
    for (const Flat& flat : flats_)
        CHECK(flat.passes == options_.micro_batches, "{}: {} of {} backward passes", flat.unit->name, flat.passes,
              options_.micro_batches);
    reduce_ready_units();
    for (; !under_way_.empty(); under_way_.pop_front()) settle(under_way_.front());
    for (Flat& flat : flats_) {
        flat.passes = 0;
        flat.reduced = false;
        if (!keeps_params() && flat.params) {  // fetched ahead, and then not needed: soon it would be out of date
            flat.gathering.wait();
            flat.gathering_rest.wait();
            free_params(flat);
        }
    }
    if (replicas_.size() == 1) return;
    std::vector<Work> works;
    for (Flat& flat : flats_) {
        if (!flat.grad_shard) {  // down, over, and up again: --offload all with replicas
            Tensor part({shard_size(flat)}, model_.options.grad_dtype, model_.options.device, Memory::workspace);
            HostCopy(part, flat.host_grads).device_waits();
            replicas_.all_reduce(part).wait();
            HostCopy(flat.host_grads, part).host_waits();
        } else {
            works.push_back(replicas_.all_reduce(flat.grad_shard));
        }
    }
    for (Work& work : works) work.wait();
}

// ---- the step -------------------------------------------------------------------------------------------------------

double Zero::norm(Which which) const {
    const bool data = which == Which::data;
    // One rank's shard of the whole model, unit by unit, segment by segment.
    const auto shard_squares = [&](int64_t shard, bool whole) {
        std::vector<Tensor> parts;
        for (const Flat& flat : flats_) {
            Tensor x = data ? flat.param_shard : flat.grad_shard;
            if (!x) x = data ? flat.host_params : flat.host_grads;
            if (whole)
                x = (data ? flat.params : flat.grads).element_slice(shard * shard_size(flat), {shard_size(flat)});
            for (const Segment& segment : segments(flat, shard, x, {}))
                if (segment.counts) parts.push_back(segment.param);
        }
        double sum = 0;
        for (const double part : squares(parts)) sum += part;
        return sum;
    };
    double sum = 0;
    if (options_.stage == 0)
        for (int64_t shard = 0; shard < shards_.size(); ++shard) sum += shard_squares(shard, true);
    else
        sum = shards_.sum(shard_squares(shards_.rank(), false));
    return std::sqrt(sum);
}

std::vector<Tensor> Zero::gradient_parts(const Param& wanted) const {
    if (keeps_grads()) return {wanted.grad};
    std::vector<Tensor> parts;
    for (const Flat& flat : flats_)
        for (const Place& place : places(flat, shards_.rank()))
            if (place.param == &wanted)
                parts.push_back(
                    (flat.grad_shard ? flat.grad_shard : flat.host_grads).element_slice(place.in_shard, {place.size}));
    return parts;
}

void Zero::update(double lr, double grad_scale) {
    if (!offloads()) {
        for (Flat& flat : flats_) flat.optimizer->step(lr, grad_scale);
    } else {
        // Gradients come down and parameters go up beside the update of the units between them.
        std::deque<HostCopy> down, up;
        for (Flat& flat : flats_)
            if (flat.grad_shard) down.emplace_back(flat.host_grads, flat.grad_shard);
        for (Flat& flat : flats_) {
            if (!down.empty()) {
                down.front().host_waits();
                down.pop_front();
            }
            flat.optimizer->step(lr, grad_scale);
            if (flat.param_shard) up.emplace_back(flat.param_shard, flat.host_params);
        }
        for (HostCopy& copy : up) copy.device_waits();
        synchronize(model_.options.device);  // the host's buffers are its own again
    }
    if (!keeps_params()) return params_changed();
    if (options_.stage == 0) return;
    std::vector<Work> works;
    for (Flat& flat : flats_) works.push_back(shards_.all_gather(flat.params, flat.param_shard));
    for (Work& work : works) work.wait();
}

Tensor Zero::whole(const Param& wanted, Which which) const {
    for (const Flat& flat : flats_) {
        int64_t begin = 0;
        for (const Param* param : flat.unit->params) {
            if (param->name != wanted.name) {
                begin += param->local.size();
                continue;
            }
            const bool data = which == Which::data;
            if (options_.stage == 0 || (data && keeps_params())) return data ? param->data : param->grad;
            Tensor shard = data ? flat.param_shard : flat.grad_shard;
            Tensor whole({flat.padded}, data ? model_.options.dtype : model_.options.grad_dtype, model_.options.device,
                         Memory::workspace);
            if (!shard) {
                shard = place_of_shard(flat, whole);
                copy(shard, data ? flat.host_params : flat.host_grads);
            }
            shards_.all_gather(whole, shard).wait();
            return ranks_.rank() == 0 ? whole.element_slice(begin, param->local_shape()) : Tensor();
        }
    }
    CHECK(false, "{} is no parameter of this model", wanted.name);
    return {};
}

int64_t Zero::owned_elements() const {
    int64_t sum = 0;
    for (const Flat& flat : flats_)
        sum += std::clamp<int64_t>(flat.size - shards_.rank() * shard_size(flat), 0, shard_size(flat));
    return sum;
}

int64_t Zero::padded_elements() const {
    int64_t sum = 0;
    for (const Flat& flat : flats_) sum += flat.padded;
    return sum;
}

void Zero::attach(Trainer& trainer) {
    CHECK(!trainer.reduce_gradients, "what builds on data parallelism is attached after it");
    trainer.data_rank = ranks_.rank();
    trainer.data_ranks = ranks_.size();
    trainer.begin = [this] { begin(); };
    trainer.reduce_gradients = [this] { finish(); };
    trainer.gradient_norm = [this] { return norm(Which::grad); };
    trainer.parameter_norm = [this] { return norm(Which::data); };
    trainer.gradient_parts = [this](const Param& param) { return gradient_parts(param); };
    trainer.update = [this](double lr, double grad_scale) { update(lr, grad_scale); };
    trainer.sum_over_ranks = [this](double x) { return ranks_.sum(x); };
    trainer.whole = [this](const Param& param, Which which) { return whole(param, which); };
}

}  // namespace train70b
