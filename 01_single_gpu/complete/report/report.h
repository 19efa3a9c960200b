#pragma once
// Output of a run: the metrics file and the memory table. Printed and written by rank 0.
#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/report/table.h"
#include "01_single_gpu/complete/step_report.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

// A JSON lines file, flushed after every line so that a run can be followed. Writes nothing until it is opened; when a
// line cannot be written, warns and writes no more.
class Metrics {
  public:
    Metrics() = default;
    ~Metrics();
    Metrics(const Metrics&) = delete;
    // Usage error if it cannot be written. append: after the complete lines that it has.
    void open(const std::string& path, bool append = false);
    void write(const nlohmann::ordered_json& line);

  private:
    std::string path_;
    FILE* stream_ = nullptr;
};

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
