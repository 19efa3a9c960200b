#pragma once
// Output of a run: the metrics file and the memory table. Printed and written by rank 0.
#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/report/table.h"
#include "01_single_gpu/complete/step_report.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

class RunControl;  // roles.h
class Trainer;     // trainer.h

// --metrics: a JSON line for the configuration, for every step and event, and for the whole run, each flushed so that a
// run can be followed. Usage error if it cannot be written; when a line cannot be, it warns and writes no more.
std::unique_ptr<RunControl> metrics_file(Trainer& trainer, const nlohmann::ordered_json& flags);

inline void say(const Table& table) { say("\n{}", table.text()); }  // after an empty line

// Measured bytes per kind next to the formula: 2, 4 or 8 bytes per parameter and per gradient, 8, 12 or 16 of optimizer
// states (half of the moments with Muon, in blocks), and the activation formula of config.h.
Table memory_table(const LlamaConfig& config, const Llama::Options& options, int64_t micro_batch, int64_t seq_len,
                   const MemoryPeak& peak, const std::string& optimizer = "adamw");

// Peaks of several runs: a row of bytes for each, and below it what the formulas say (-1: there is none). Host memory
// and disk are shown only where there is some.
inline constexpr MemoryBytes kNoFormula = {-1, -1, -1, -1, -1, -1, -1, -1};
struct MemoryRow {
    std::string name;
    MemoryPeak peak;
    MemoryBytes formula = kNoFormula;
};
Table memory_table(const std::string& caption, const std::vector<MemoryRow>& rows);

}  // namespace train70b
