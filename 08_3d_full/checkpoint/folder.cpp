#include "08_3d_full/checkpoint/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "01_single_gpu/core/number.h"
#include "01_single_gpu/core/say.h"
#include "02_data_parallel/runtime/connect.h"
#include "07_fp8/complete/optimizers.h"
#include "08_3d_full/checkpoint/durable.h"

namespace train70b {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

void add_checkpoint_flags(CommandLine& flags, CheckpointOptions& o) {
    const auto not_empty = [](const std::string& path) {
        return path.empty() ? std::string("empty path (must name a folder)") : std::string();
    };
    flags.group("Checkpoints");
    flags.add("--checkpoint-dir", o.dir,
              "DIR: checkpoints, at the end and on SIGUSR1 (on a cluster shared by all nodes) [default: none]",
              {.problem = not_empty, .name = "DIR"});
    flags.add("--checkpoint-every", o.every, "steps between checkpoints; 0: only when the run ends", integer_from(0));
    flags.add("--weights-every", o.weights_every, "steps between checkpoints of the weights only; 0: none",
              integer_from(0));
    flags.add("--keep", o.keep, fmt::format("full checkpoints to keep [default: {}]", kCheckpointsKept),
              integer_from(1));
    flags
        .add("--after-checkpoint", o.after,
             "COMMAND: rank 0 runs it by /bin/sh beside the training, with a complete checkpoint in "
             "TRAIN70B_CHECKPOINT; one at a time, the newest waits [default: none]",
             {.problem = {}, .name = "COMMAND"})
        .default_text("");
    flags.add_flag("--resume", o.resume, "go on from the newest complete checkpoint in --checkpoint-dir");
    flags.add("--resume-from", o.resume_from, "DIR/step-N: go on from this checkpoint [default: none]",
              {.problem = not_empty, .name = "DIR/step-N"});
    flags.add("--stop-after", o.stop_after, "stop after this step, with a checkpoint; 0: after --steps",
              integer_from(0));
}

ordered_json fingerprint(const Dataset& data) {
    const auto crc = [](const auto& values) {
        const auto* bytes = reinterpret_cast<const Bytef*>(values.data());
        return uint32_t(crc32_z(0, bytes, values.size() * sizeof(values[0])));
    };
    ordered_json sources = ordered_json::array();
    for (const Dataset::Part& part : data.parts()) {
        const Source& source = *part.source;
        const int64_t first = std::min<int64_t>(source.tokens(), 1 << 16);
        ordered_json entry = {{"tokens", source.tokens()}, {"crc32", crc(source.read(0, first))}};
        if (source.has_masks()) entry["mask_crc32"] = crc(source.read_mask(0, first));
        if (data.is_mixture()) entry["weight"] = part.weight;
        sources.push_back(std::move(entry));
    }
    return data.is_mixture() ? ordered_json{{"sources", std::move(sources)}} : sources[0];
}

ordered_json layout_json(const Mesh& mesh) {
    ordered_json layout = {{"tp", mesh.tp}, {"cp", mesh.cp}, {"dp", mesh.dp}, {"pp", mesh.pp}};
    if (mesh.ep > 1) layout["ep"] = mesh.ep;
    return layout;
}

bool same_layout(const Manifest& manifest, const Mesh& mesh) {
    return manifest.json->value("layout", json()) == json(layout_json(mesh));
}

std::vector<int64_t> old_checkpoints(const std::string& dir, int64_t keep, int64_t newest) {
    std::vector<int64_t> steps = checkpoint_steps(dir);
    std::erase_if(steps, [&](int64_t step) { return step > newest; });
    steps.resize(steps.size() - size_t(std::min(keep, int64_t(steps.size()))));
    return steps;
}

void remove_checkpoints(const std::string& dir, const std::vector<int64_t>& steps) {
    for (const int64_t step : steps) {
        const std::string folder = fmt::format("{}/step-{}", dir, step);
        rename_durably(folder, folder + ".tmp");  // what is half removed must not look complete
        remove_folder(folder + ".tmp");
    }
}

namespace {

// What must be the same for the losses to go on as if nothing had happened (with a ramp --global-batch, too), and what
// may change, which is said.
constexpr const char* kFixed[] = {"seed", "seq-len",     "val-fraction", "dtype",    "grad-dtype",     "optimizer",
                                  "fp8",  "fp8-history", "batch-ramp",   "seq-ramp", "document-token", "mup"};
constexpr const char* kFixedSwitches[] = {"mask-document-ends", "stochastic-rounding"};  // off before there was one
constexpr const char* kNoted[] = {"steps",        "lr",     "min-lr",    "warmup-steps", "lr-schedule",
                                  "weight-decay", "beta1",  "beta2",     "eps",          "clip",
                                  "fp8-margin",   "z-loss", "skip-step", "mtp-loss",     "loss-scale"};

// By the names of the flags.
ordered_json shape_of(const LlamaConfig& c) {
    const auto word = [](bool value) { return value ? "on" : "off"; };
    ordered_json shape = {{"layers", c.layers},
                          {"hidden", c.hidden},
                          {"heads", c.heads},
                          {"kv-heads", c.kv_heads},
                          {"head-dim", c.value_dim()},
                          {"ffn", c.ffn},
                          {"vocab", c.vocab},
                          {"qkv-bias", word(c.qkv_bias)},
                          {"qk-norm", word(c.qk_norm)},
                          {"tied-embeddings", word(c.tied)},
                          {"window", c.window},
                          {"sinks", word(c.sinks)},
                          {"kv-lora-rank", c.latent.kv_rank},
                          {"q-lora-rank", c.latent.q_rank},
                          {"qk-rope-head-dim", c.latent.rope_dim},
                          {"mtp", word(c.multi_token)}};
    const ordered_json other = other_part(c);
    for (const auto& [part, fields] : other.items()) shape.update(fields);
    return shape;
}

void check_model(const Manifest& manifest, const LlamaConfig& this_run) {
    const LlamaConfig& saved = manifest.model;
    const ordered_json shape = shape_of(saved), run_shape = shape_of(this_run);
    const auto word = [](const ordered_json& value) {
        return value.is_string() ? value.get<std::string>() : value.dump();
    };
    for (const auto& [flag, value] : shape.items())
        if (const ordered_json here = run_shape.value(flag, ordered_json()); value != here)
            usage_error("{}: a checkpoint of another model: its --{} is {}, but this run's is {} (try --{} {})",
                        manifest.folder, flag, word(value), word(here), flag, word(value));
    const ordered_json there = hf_config(dense_part(saved), DType::f32),
                       here = hf_config(dense_part(this_run), DType::f32);
    for (const char* key : {"rms_norm_eps", "rope_theta", "rope_scaling"})
        if (there[key] != here[key])
            usage_error("{}: a checkpoint of another model: its {} is {}, but this run's is {}", manifest.folder, key,
                        there[key].dump(), here[key].dump());
    for (int64_t layer = 0; layer < saved.layers; ++layer)
        if (saved.has_window(layer) != this_run.has_window(layer))
            usage_error("{}: a checkpoint of another model: layer {} has {} window (try another --window-every)",
                        manifest.folder, layer, saved.has_window(layer) ? "a" : "no");
}

// Of two flags: 1e-3 is 0.001.
bool same_value(const std::string& a, const std::string& b) {
    return a == b || (parse_number(a) && parse_number(a) == parse_number(b));
}

void check_flags_of(const Manifest& manifest, const ordered_json& flags, DType dtype) {
    const json saved = manifest.json->value("flags", json::object());
    const auto text = [](const auto& object, const char* name) {
        const auto found = object.find(name);
        if (found != object.end() && found->is_string()) return found->template get<std::string>();
        return std::string(std::ranges::count(kFixedSwitches, std::string_view(name)) > 0 ? "off" : "");
    };
    std::vector<const char*> fixed(std::begin(kFixed), std::end(kFixed));
    fixed.insert(fixed.end(), std::begin(kFixedSwitches), std::end(kFixedSwitches));
    const std::vector<const char*> others = fixed_flags_of_other_part();
    if (manifest.model.is_sparse()) fixed.insert(fixed.end(), others.begin(), others.end());
    const bool ramp = !text(flags, "batch-ramp").empty() || !text(flags, "seq-ramp").empty();
    if (ramp) fixed.push_back("global-batch");
    for (const char* name : fixed) {
        const std::string there = text(saved, name), here = text(flags, name);
        const auto shown = [name](const std::string& value) {
            return value.empty() ? fmt::format("no --{}", name) : fmt::format("--{} {}", name, value);
        };
        if (!same_value(there, here))
            usage_error("{}: the checkpoint {} is of a run with {}{} (try that)", shown(here), manifest.folder,
                        shown(there), ramp && name == fixed.back() ? " and a ramp" : "");
    }
    std::string changed;
    for (const char* name : kNoted)
        if (const std::string there = text(saved, name), here = text(flags, name);
            saved.contains(name) && !same_value(there, here))
            changed += fmt::format("{} --{} {}, not {}", changed.empty() ? "" : ",", name, here, there);
    const bool rounds = text(saved, "stochastic-rounding") == "on";
    const auto disagrees = [&](const std::string& flag, const std::string& value) {
        return !flag.empty() && flag != value;
    };
    if (disagrees(text(saved, "dtype"), manifest.dtype) ||
        disagrees(rounds ? kStochasticRounding : text(saved, "optimizer"), manifest.optimizer))
        usage_error("{}/manifest.json: corrupt: \"dtype\" or \"optimizer\" is not that of its \"flags\"",
                    manifest.folder);
    if (!changed.empty()) say("differs from the checkpoint's run:{}\n", changed);
    const std::string core = manifest.json->value("blas_core", std::string());
    const std::string here = cpu::product_kernels(dtype);
    if (core != here)
        say("the checkpoint was computed with {} kernels, this run uses {}: last bits differ\n", core, here);
}

// A folder with checkpoints can only be continued from its newest one.
void check_other_runs(const std::string& dir, const std::optional<Manifest>& start) {
    const std::vector<int64_t> steps = checkpoint_steps(dir);
    const bool weights = !checkpoint_steps(dir, "weights-").empty();
    if (steps.empty() && !weights) return;
    const std::string newest = steps.empty() ? "weights" : fmt::format("step-{}", steps.back());
    if (!start)
        usage_error(
            "--checkpoint-dir {}: has the checkpoints of another run, up to {} (try --resume, or another folder)", dir,
            newest);
    std::error_code error;
    if (steps.empty() || !fs::equivalent(start->folder, dir + "/" + newest, error))
        usage_error(
            "--checkpoint-dir {}: has checkpoints up to {}, which a run from {} would overwrite (try another "
            "folder, or move them)",
            dir, newest, start->folder);
}

// Every rank writes a file, and rank 0 must see all of them.
void check_shared(const CheckpointOptions& options, const Comm& world) {
    const auto probe = [&](int rank) { return fmt::format("{}/.rank-{}.probe", options.dir, rank); };
    struct Remove {
        std::string path;
        ~Remove() { ::unlink(path.c_str()); }
    } const this_run{probe(world.rank())};
    together([&] {
        ::unlink(this_run.path.c_str());  // a killed run's; of a link never what it points to
        const int fd = ::open(this_run.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        // On a full disk a run that resumes may make room (--keep).
        if (fd < 0 || (!options.resumes() && ::write(fd, "x", 1) != 1)) {
            const std::string why = std::strerror(errno);
            if (fd >= 0) ::close(fd);
            usage_error("--checkpoint-dir {}: rank {} cannot write there ({})", options.dir, world.rank(), why);
        }
        ::close(fd);
    });
    together([&] {
        for (int rank = 0; this_rank == 0 && rank < world.size(); ++rank)
            if (::access(probe(rank).c_str(), F_OK) != 0)
                usage_error(
                    "--checkpoint-dir {}: rank 0 does not see what rank {} writes there (must be on a file "
                    "system that all nodes share)",
                    options.dir, rank);
    });
}

void remove_leftovers(const std::string& dir) {
    std::error_code error;
    for (auto it = fs::directory_iterator(dir, error); !error && it != fs::directory_iterator(); it.increment(error)) {
        const std::string name = it->path().filename().string();
        if (name.ends_with(".tmp") && (name.starts_with("step-") || name.starts_with("weights-")))
            remove_folder(it->path().string());
    }
}

}  // namespace

CheckpointFolder::CheckpointFolder(const CheckpointOptions& checkpoint_options, TrainOptions& training,
                                   const ParallelConfig& config, const ordered_json& flags, const Comm& world)
    : options(checkpoint_options) {
    if (!options.dir.empty()) {  // what is there is read when no other run writes any more
        together([&] {
            if (this_rank != 0) return;
            make_folder();
            lock_.emplace(options.dir);
        });
        check_shared(options, world);
    }
    if (options.resumes()) {
        std::string folder = options.resume_from;
        if (folder.empty()) {  // rank 0 decides: network file systems show other nodes' folders with a delay
            const std::vector<int64_t> steps = checkpoint_steps(options.dir);
            const double newest = world.sum(this_rank == 0 && !steps.empty() ? double(steps.back()) : 0.0);
            if (newest == 0)
                usage_error("--resume: {} has no complete checkpoint (leave it out to start at step 1)", options.dir);
            folder = fmt::format("{}/step-{}", options.dir, int64_t(newest));
        }
        together([&] { open_start(folder, training, flags, world); });
        training.append_metrics = true;
        say("resumes {}: step {} of {}, written by {} ranks{}\n", start->folder, start->step + 1, training.steps,
            start->ranks, same_layout(*start, config.mesh) ? "" : " in another layout");
    }
    if (options.dir.empty()) return;
    together([&] { check_other_runs(options.dir, start); });
    together([&] {
        if (!lock_) return;
        lock_->keep();
        remove_leftovers(options.dir);
    });
}

void check_checkpoint_flags(const CheckpointOptions& options, const TrainOptions& training, const Comm& world) {
    for (const auto& [given, flag] : {std::pair(options.every > 0, "--checkpoint-every"),
                                      {options.weights_every > 0, "--weights-every"},
                                      {options.keep.has_value(), "--keep"},
                                      {!options.after.empty(), "--after-checkpoint"},
                                      {options.resume, "--resume"}})
        if (given && options.dir.empty()) usage_error("{}: needs --checkpoint-dir DIR", flag);
    if (!options.dir.empty() && !world.has_peers())
        usage_error("--checkpoint-dir {}: with --comm fake there is only one rank's part of the model; leave it out",
                    options.dir);
    if (options.resumes() && !world.has_peers())
        usage_error("--resume: with --comm fake there is only one rank's part of the model; leave it out");
    if (options.resume && !options.resume_from.empty())
        usage_error("--resume: goes on from the newest checkpoint, --resume-from from {} (use one of the two)",
                    options.resume_from);
    if (options.resumes() && !training.save_reference.empty())
        usage_error("--save-reference {}: a reference run begins at step 1; leave out --resume",
                    training.save_reference);
    if (options.stop_after > training.steps)
        usage_error("--stop-after {}: must be at most --steps {}", options.stop_after, training.steps);
}

void CheckpointFolder::make_folder() {
    std::vector<std::string> grown;  // folders that get a new entry
    std::error_code error;
    for (fs::path at = fs::absolute(options.dir); !fs::exists(at, error); at = at.parent_path())
        grown.push_back(at.parent_path().string());
    made_.emplace("--checkpoint-dir", options.dir);
    try {
        for (const std::string& folder : grown) sync_folder(folder);
    } catch (const std::runtime_error& failure) { usage_error("--checkpoint-dir {}: {}", options.dir, failure.what()); }
}

int64_t ChangedSizes::first_sample(int64_t step) const {
    int64_t sum = 0;
    for (size_t i = 0; i < batches_.size(); ++i) {
        const int64_t end = i + 1 < batches_.size() ? std::min(step, batches_[i + 1].step) : step;
        sum += std::max<int64_t>(end - batches_[i].step, 0) * batches_[i].batch;
    }
    return sum;
}

// Counts samples as the checkpoint's run did, and says where this run's batch is another.
void CheckpointFolder::go_on_counting(TrainOptions& training, const std::string& advice) {
    const auto saved = [&](const char* flag, int64_t otherwise) {
        const std::string value = start->json->value("flags", json::object()).value(flag, std::string());
        return integer_from(1).problem(value).empty() ? std::stoll(value) : otherwise;
    };
    const int64_t batch = training.global_batch, before = saved("global-batch", batch);
    std::vector<BatchFrom>& batches = start->batches;
    if (batches.empty()) batches = {{1, before}};
    if (!training.step_sizes) training.step_sizes = std::make_shared<ChangedSizes>(batches, training.seq_len);
    const int64_t next = training.sizes()->first_sample(start->step + 1);
    if (start->json->value("next_sample", json()) != json(next) || batches.back().batch != before)
        usage_error(
            "{}/manifest.json: corrupt: \"next_sample\" is not that of \"step\", --global-batch and \"batches\"{}",
            start->folder, advice);
    if (batch == before) return;
    const int64_t more = training.sizes()->first_sample(saved("steps", 0) + 1) - next,
                  steps = start->step + (more + batch - 1) / batch;
    say("differs from the checkpoint's run: --global-batch {}, not {}: from step {} on, sample {}{}\n", batch, before,
        start->step + 1, next,
        more > 0 && steps != training.steps ? fmt::format(" (as many samples as before: --steps {})", steps) : "");
    batches.push_back({start->step + 1, batch});
    training.step_sizes = std::make_shared<ChangedSizes>(batches, training.seq_len);
}

void CheckpointFolder::open_start(std::string folder, TrainOptions& training, const ordered_json& flags,
                                  const Comm& world) {
    while (folder.size() > 1 && folder.ends_with("/")) folder.pop_back();
    const std::string dir = fs::path(folder).parent_path().string();
    std::string advice;
    for (const int64_t step : checkpoint_steps(dir.empty() ? "." : dir)) {  // the newest one before this
        const std::string name = fmt::format("step-{}", step);
        if (fs::path(folder).filename() == name) break;
        advice = fmt::format(" (try --resume-from {}{}{})", dir, dir.empty() ? "" : "/", name);
    }
    try {
        start = read_manifest(folder);
    } catch (const UsageError& error) { usage_error("{}{}", error.what(), advice); }
    if (start->kind != "full")
        usage_error("{}: holds the weights only; a run goes on from a full checkpoint, DIR/step-N{}", folder, advice);
    check_model(*start, training.model);
    check_flags_of(*start, flags, training.llama().dtype);
    go_on_counting(training, advice);
    if (start->step >= training.steps && options.stop_after == 0 && training.save_hf.empty())
        usage_error("{}: is of step {}, and --steps is {} (try --steps {})", folder, start->step, training.steps,
                    2 * start->step);
    if (this_rank == 0) {
        const Dataset data(training.data, training.model.vocab, training.seq_len, training.val_fraction);
        if (json(fingerprint(data)) != start->json->value("data", json()))
            usage_error("--data {}: is not the data of the checkpoint {}, of a run with --data {} (use that)",
                        training.data, folder,
                        start->json->value("flags", json::object()).value("data", std::string()));
    }
    for (size_t i = size_t(world.rank()); i < start->files.size(); i += size_t(world.size()))
        verify_file(*start, start->files[i], advice);
}

FolderLock::FolderLock(const std::string& dir) : path_(dir + "/.lock") {
    for (int tries = 50;; --tries) {  // a run that is ending needs a moment
        file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        made_ = file_ >= 0;
        if (!made_) file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (file_ < 0) usage_error("--checkpoint-dir {}: cannot be written ({})", dir, std::strerror(errno));
        struct stat this_run {
        }, there{};
        // The lock counts if the file is still this one, not removed by hand.
        if (::flock(file_, LOCK_EX | LOCK_NB) == 0 && ::fstat(file_, &this_run) == 0 &&
            ::stat(path_.c_str(), &there) == 0 && this_run.st_dev == there.st_dev && this_run.st_ino == there.st_ino)
            return;
        ::close(file_);
        if (tries == 0)
            usage_error("--checkpoint-dir {}: another run is writing there (use another folder, or end that run)", dir);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

FolderLock::~FolderLock() {
    if (made_) ::unlink(path_.c_str());
    ::close(file_);
}

}  // namespace train70b
