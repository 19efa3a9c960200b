#include "05_pipeline/complete/plot_script.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

namespace {

// An empty file in the folder for temporary files, deleted in the destructor.
class TemporaryFile {
  public:
    TemporaryFile() : path_((std::filesystem::temp_directory_path() / "train70b_XXXXXX").string()) {
        const int file = mkstemp(path_.data());
        if (file < 0) throw std::runtime_error(fmt::format("{}: {}", path_, std::strerror(errno)));
        ::close(file);
    }
    ~TemporaryFile() { std::remove(path_.c_str()); }
    TemporaryFile(const TemporaryFile&) = delete;

    const std::string& path() const { return path_; }
    std::string text() const {
        std::ifstream stream(path_, std::ios::binary);
        return {std::istreambuf_iterator<char>(stream), {}};
    }

  private:
    std::string path_;
};

}  // namespace

int run_child(const std::vector<std::string>& words, std::string& said) {
    const TemporaryFile errors;
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDERR_FILENO, errors.path().c_str(), O_WRONLY | O_TRUNC, 0);
    posix_spawnattr_t attributes;  // an empty signal mask: this process blocks SIGTERM, which the child would inherit
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);

    std::vector<std::string> copies = words;
    std::vector<char*> arguments;
    for (std::string& word : copies) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t child = 0;
    const int failure = posix_spawnp(&child, arguments[0], &files, &attributes, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (failure != 0) {
        said = std::strerror(failure);
        return 127;
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return 127;
    said = errors.text();
    said.erase(said.find_last_not_of('\n') + 1);
    said.erase(0, said.rfind('\n') + 1);  // all but the last line
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// The first python3 in PATH, or the system's, that has matplotlib.
std::string python_with_matplotlib(const std::string& others) {
    std::string said;
    for (const char* python : {"python3", "/usr/bin/python3"})
        if (run_child({python, "-c", "import matplotlib"}, said) == 0) return python;
    usage_error("--draw: needs matplotlib (Debian: python3-matplotlib); {} nothing", others);
}

std::string draw(const std::string& python, const std::string& timelines) {
    const TemporaryFile data, picture;
    std::ofstream(data.path(), std::ios::binary) << timelines;
    std::string said;
    const int code = run_child(
        {python, repository_file("05_pipeline/complete/plot_timelines.py"), data.path(), picture.path()}, said);
    if (code != 0)
        throw std::runtime_error(
            fmt::format("--draw: {} 05_pipeline/complete/plot_timelines.py ended with exit code {}: {}", python, code,
                        said.empty() ? "it said nothing" : said));
    return picture.text();
}

}  // namespace train70b
