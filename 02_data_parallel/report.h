#pragma once
// What chapter 02 prints and writes around its training run.
#include "02_data_parallel/benchmarks.h"
#include "02_data_parallel/runtime/program.h"

namespace train70b {

class DataParallelReport {
  public:
    void add_flags(CommandLine& flags);  // --all-reduce-csv, --modes-csv
    void open(const Program& program);   // the files; usage errors
    void say_layout(const Program& program, const DataParallel& store) const;
    // The memory of this rank and, on several ranks, the tables of benchmarks.h.
    void print(Program& program, const Comm& ranks, DataParallel& store, const DataParallelOptions& options);

  private:
    std::string all_reduce_csv_, modes_csv_;
    std::optional<OutputFile> all_reduce_file_, modes_file_;
};

}  // namespace train70b
