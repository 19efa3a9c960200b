#pragma once
// Files that survive a power failure once they and their folders are synchronized, and a thread that writes them. No
// function here calls MPI or the memory ledger.
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace train70b {

struct WrittenFile {
    int64_t bytes = 0;
    uint32_t crc32 = 0;
    double seconds = 0;
};
enum class Durable { no, yes };

struct DiskFull : std::runtime_error {
    using runtime_error::runtime_error;
};

// Unless noexcept, these throw std::runtime_error "PATH: cannot be written (Input/output error)", or DiskFull.
// Creates or replaces the file with these parts, one after another. Its entry in the folder is not yet durable.
WrittenFile write_file(const std::string& path, const std::vector<std::string_view>& parts,
                       Durable durable = Durable::yes);
std::string read_whole_file(const std::string& path);
void sync_folder(const std::string& path);                            // its entries: created, renamed, removed
void make_folder(const std::string& path);                            // fine if it exists
void rename_durably(const std::string& from, const std::string& to);  // both in one folder
void remove_folder(const std::string& path) noexcept;                 // with its files; whatever can be removed

// One thread that runs tasks in their order.
class BackgroundWriter {
  public:
    BackgroundWriter();
    ~BackgroundWriter();  // waits for the task that runs; drops the others
    BackgroundWriter(const BackgroundWriter&) = delete;

    void start(std::function<void()> task);
    bool busy();
    void wait();
    struct Failure {
        std::string what;  // empty: none
        bool disk_full = false;
    };
    Failure take_failure();  // what the first failed task threw since the last call

  private:
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;  // the first one runs
    Failure failure_;
    bool stop_ = false;
    std::thread thread_;
};

}  // namespace train70b
