#include "08_3d_full/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/version.h"
#include "02_data_parallel/runtime/comm_roles.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {
constexpr double kDiskFull = 1e6;  // a vote of more than all ranks' other failures, 1 each

std::string rank_file(int64_t rank) { return fmt::format("rank-{:05}", rank); }

std::string newest_text(const std::string& dir) {
    const std::vector<int64_t> steps = checkpoint_steps(dir);
    return steps.empty() ? "there is no complete checkpoint" : fmt::format("the newest is step-{}", steps.back());
}
}  // namespace

Checkpoints::Checkpoints(const CheckpointFolder& folder, const ParallelConfig& config, const ordered_json& flags,
                         Trainer& trainer, const Comm& world)
    : options_(folder.options),
      config_(config),
      flags_(flags),
      data_(fingerprint(trainer.data)),
      trainer_(trainer),
      world_(world),
      start_(folder.start),
      after_(options_.after, trainer) {
    if (!options_.dir.empty()) watchdog->stop_on_signals();
}

// ---- the run's beginning -----------------------------------------------------------------------------------------

int64_t Checkpoints::first_step() {
    if (start_) {
        write_files(world_, [&] {
            restore(*start_, *trainer_.store, trainer_.step_states,
                    same_layout(*start_, config_.mesh) ? rank_file(world_.rank()) + ".safetensors" : "");
        });
        step_ = start_->step;
        // A checkpoint elsewhere is not this folder's newest one.
        const bool is_newest = this_rank == 0 && !options_.dir.empty() && !checkpoint_steps(options_.dir).empty();
        if (world_.sum(is_newest ? 1.0 : 0.0) > 0) newest_ = last_full_ = step_;
    }
    if (!options_.dir.empty()) snapshot_.emplace(*trainer_.store, trainer_.step_states);
    return step_ + 1;
}

// ---- a step ------------------------------------------------------------------------------------------------------

// tag::step[]
bool Checkpoints::after_step(const StepReport& report) {
    if (options_.dir.empty()) return true;
    const bool is_busy = writer_.busy();  // before the failure: what has ended has thrown by then
    const std::vector<double> votes =
        trainer_.groups.sum({watchdog->stop_requested() ? 1.0 : 0.0, is_busy ? 1.0 : 0.0, failure_vote()});
    const bool stop = votes[0] > 0, busy = votes[1] > 0;
    step_ = report.step;
    failures_ += votes[2];  // perhaps while another rank, or the next file, was still being written
    if (!pending_ || !busy) end_pending();
    full_is_due_ = full_is_due_ || (options_.every > 0 && step_ % options_.every == 0);
    weights_are_due_ = weights_are_due_ || (options_.weights_every > 0 && step_ % options_.weights_every == 0);
    // While the last one is being written the next one waits; the step never does.
    if (!pending_ && (full_is_due_ || weights_are_due_)) take_snapshot(full_is_due_, weights_are_due_);
    if (this_rank == 0) report_committed();
    return !stop;
}
// end::step[]

void Checkpoints::finish() {
    if (options_.dir.empty()) return;
    wait_for_pending();
    for (int tries = 2; tries > 0 && step_ > 0 && last_full_ != step_; --tries) {  // the first may make room
        take_snapshot(true, weights_are_due_);
        wait_for_pending();
    }
    if (step_ > 0 && last_full_ != step_) {
        if (this_rank == 0)
            throw std::runtime_error(
                fmt::format("--checkpoint-dir {}: the checkpoint of the last step, {}, could not be written; {}",
                            options_.dir, step_, newest_text(options_.dir)));
        world_.barrier().wait();  // until rank 0 ends all
    }
    if (!options_.after.empty()) write_files(world_, [&] { after_.look(true); });
    if (watchdog->stop_requested()) say("stopped by a signal after step {}; --resume goes on\n", step_);
}

double Checkpoints::failure_vote() {
    const BackgroundWriter::Failure failure = writer_.take_failure();
    if (failure.what.empty()) return 0;
    fmt::print(stderr, "rank {}: checkpoint: {}\n", this_rank, failure.what);
    return failure.disk_full ? kDiskFull : 1;
}

void Checkpoints::take_snapshot(bool full, bool weights) {
    pending_ = Written{.step = step_, .folders = {}, .copy_s = snapshot_->copy(), .begin = now_seconds()};
    if (full) pending_->folders.push_back(fmt::format("step-{}", step_));
    if (weights) pending_->folders.push_back(fmt::format("weights-{}", step_));
    if (full) last_full_ = step_;
    full_is_due_ = weights_are_due_ = false;
    for (const std::string& folder : pending_->folders) {
        writer_.start([this, weights_only = folder.starts_with("weights"), path = options_.dir + "/" + folder + ".tmp",
                       name = rank_file(world_.rank())] {
            const Snapshot::Content content = snapshot_->content(weights_only);
            make_folder(path);
            std::vector<std::string_view> parts = {content.header};
            parts.insert(parts.end(), content.data.begin(), content.data.end());
            const std::string file = name + ".safetensors";
            const WrittenFile written = write_file(path + "/" + file, parts);
            const ordered_json entry = {{"name", file},
                                        {"bytes", written.bytes},
                                        {"crc32", written.crc32},
                                        {"tensors", content.names},
                                        {"seconds", written.seconds}};
            write_file(path + "/" + name + ".json", {entry.dump()}, Durable::no);  // for the commit on rank 0
            sync_folder(path);
        });
    }
}

// The parts of the pending checkpoint are written, or one of them has failed. Nothing may be pending: then the commit
// of the one before may have failed.
void Checkpoints::end_pending() {
    const double failures = std::exchange(failures_, 0);
    if (!pending_ && failures == 0) return;
    if (!pending_) {  // the last commit failed: nothing is known to be complete but what is on the disk
        newest_ = last_full_ = 0;
        if (this_rank == 0) note_failure(committing_, failures);
        return;
    }
    const Written done = *std::exchange(pending_, std::nullopt);
    if (failures == 0) {
        if (done.folders.front().starts_with("step-")) newest_ = done.step;
        committing_ = done.step;
        if (this_rank == 0)
            writer_.start([this, done] {
                try {
                    commit(done);
                } catch (...) {
                    for (const std::string& folder : done.folders) remove_folder(options_.dir + "/" + folder + ".tmp");
                    throw;
                }
            });
        return;
    }
    last_full_ = newest_;
    if (this_rank != 0) return;
    for (const std::string& folder : done.folders)
        writer_.start([path = options_.dir + "/" + folder + ".tmp"] { remove_folder(path); });
    note_failure(done.step, failures);
}

// What a rank says about its file, once the file is here: network file systems show other nodes' files with a delay.
static ordered_json entry_of_rank(const std::string& path, int rank) {
    const std::string name = path + "/" + rank_file(rank);
    for (int tries = 50; tries > 0; --tries) {
        std::error_code error;
        const auto bytes = fs::file_size(name + ".safetensors", error);
        ordered_json entry;
        if (!error && fs::exists(name + ".json", error))
            entry = ordered_json::parse(read_whole_file(name + ".json"), nullptr, false);
        if (entry.is_object() && bytes == entry.value("bytes", uintmax_t(0))) return entry;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    throw std::runtime_error(name + ".safetensors: rank 0 does not see what the rank has written");
}

// In rank 0's writer thread.
void Checkpoints::commit(const Written& checkpoint) {
    for (const std::string& folder : checkpoint.folders) {
        const bool full = folder.starts_with("step-");
        const std::string final = options_.dir + "/" + folder, path = final + ".tmp";
        ordered_json manifest = manifest_of(checkpoint.step, full ? "full" : "weights");
        double write_s = 0;
        int64_t bytes = 0;
        for (int rank = 0; rank < world_.size(); ++rank) {
            ordered_json entry = entry_of_rank(path, rank);
            write_s = std::max(write_s, entry.value("seconds", 0.0));
            bytes += entry.value("bytes", int64_t(0));
            entry.erase("seconds");
            manifest["files"].push_back(std::move(entry));
        }
        const std::string text = json_text(manifest, 1) + "\n";
        write_file(path + "/manifest.json", {text});
        for (int rank = 0; rank < world_.size(); ++rank) fs::remove(path + "/" + rank_file(rank) + ".json");
        sync_folder(path);
        // The target may exist: a full checkpoint whose commit failed after the rename, or weights written before the
        // run went back to an older checkpoint.
        const std::string replaced = final + ".replaced.tmp";
        if (!full && fs::exists(final)) rename_durably(final, replaced);
        if (full && fs::exists(final + "/manifest.json")) {
            if (read_whole_file(final + "/manifest.json") != text)
                throw std::runtime_error(final + ": is there already, with another manifest; it is left as it is");
            remove_folder(path);
        } else {
            rename_durably(path, final);
        }
        remove_folder(replaced);
        if (full) remove_checkpoints(options_.dir, old_checkpoints(options_.dir, options_.kept(), checkpoint.step));
        const std::lock_guard lock(mutex_);
        committed_.push_back({{"event", "checkpoint"},
                              {"step", checkpoint.step},
                              {"folder", folder},
                              {"bytes", bytes},
                              {"copy_s", checkpoint.copy_s},
                              {"write_s", write_s},
                              {"commit_s", now_seconds() - checkpoint.begin}});
    }
}

void Checkpoints::report_committed() {
    std::unique_lock lock(mutex_);
    const std::vector<ordered_json> events = std::exchange(committed_, {});
    lock.unlock();
    for (const ordered_json& event : events) {
        const double bytes = event["bytes"], copy = event["copy_s"], write = event["write_s"], all = event["commit_s"];
        trainer_.note(fmt::format("          {}: {}, copied in {:.1f} ms, written in {:.2f} s ({}/s), complete after "
                                  "{:.2f} s",
                                  event["folder"].get<std::string>(), human_bytes(bytes), copy * 1e3, write,
                                  human_bytes(bytes / std::max(write, 1e-9)), all),
                      event);
        after_.complete(options_.dir + "/" + event["folder"].get<std::string>());
    }
    after_.look();  // last: a folder that is no longer kept does not wait
}

// Until the pending checkpoint is complete, or dropped. Collective.
void Checkpoints::wait_for_pending() {
    for (int phase = 0; phase < 3; ++phase) {  // the ranks' files; rank 0's commit; room that it has made
        write_files(world_, [&] { writer_.wait(); });
        failures_ += world_.sum(failure_vote());
        end_pending();
    }
    if (this_rank == 0) report_committed();
}

// On rank 0. What is complete now is what the disk has.
void Checkpoints::note_failure(int64_t step, double failures) {
    const std::vector<int64_t> steps = checkpoint_steps(options_.dir);
    std::string line = fmt::format("checkpoint of step {}: not written; {}", step, newest_text(options_.dir));
    std::vector<int64_t> old;  // removed after a success only, which there would never be
    if (failures >= kDiskFull) old = old_checkpoints(options_.dir, options_.kept(), step_);
    if (!old.empty()) {
        line += fmt::format("; the disk is full: removes {} older ones, up to step-{} (--keep {})", old.size(),
                            old.back(), options_.kept());
        writer_.start([dir = options_.dir, old] {
            try {
                remove_checkpoints(dir, old);
            } catch (const std::exception&) {}  // tried again at the next failure
        });
    }
    trainer_.note(line, {{"event", "checkpoint_failed"}, {"step", step}, {"newest", steps.empty() ? 0 : steps.back()}});
}

ordered_json Checkpoints::manifest_of(int64_t step, const std::string& kind) const {
    const TrainOptions& training = trainer_.options;
    ordered_json manifest = {{"format", kCheckpointFormat},
                             {"version", kCheckpointVersion},
                             {"kind", kind},
                             {"step", step},
                             {"next_sample", trainer_.batches.sizes().first_sample(step + 1)},
                             {"ranks", world_.size()},
                             {"layout", layout_json(config_.mesh)},
                             {"dtype", training.dtype},
                             {"optimizer", config_.optimizer},
                             {"model", hf_config(dense_part(training.model), training.llama().dtype)},
                             {"data", data_},
                             {"flags", flags_},
                             {"commit", build_commit()},
                             {"blas_core", cpu::product_kernels(training.llama().dtype)},
                             {"files", ordered_json::array()}};
    for (const BatchFrom& from : start_ && start_->batches.size() > 1 ? start_->batches : std::vector<BatchFrom>())
        manifest["batches"].push_back({{"from_step", from.step}, {"global_batch", from.batch}});
    if (training.model.is_sparse()) manifest.update(other_part(training.model));
    return manifest;
}

}  // namespace train70b
