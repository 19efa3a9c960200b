#pragma once
// Bad input to the programs, called in this process: a usage error of one line, and nothing changed on disk.
#include <map>

#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/core/memory.h"
#include "02_data_parallel/runtime/watchdog.h"
#include "tests/files.h"
#include "tests/programs.h"
#include "tests/support.h"

namespace train70b::test {

inline std::vector<std::string> split_at(const std::string& text, char by) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
    return parts;
}

// "--flag value" pairs of `defaults` whose flag is not among `flags`, and `flags`.
inline std::string completed(const std::string& flags, const std::string& defaults) {
    const std::vector<std::string> given = split_at(flags, ' '), words = split_at(defaults, ' ');
    std::string all;
    for (size_t i = 0; i < words.size(); i += 2)
        if (std::find(given.begin(), given.end(), words[i]) == given.end()) all += words[i] + " " + words[i + 1] + " ";
    return all + flags;
}

// A folder with two in it: `files`, the cases' input, and `run`, where the programs run. While it exists, programs
// print nothing on standard output.
class Workplace {
  public:
    Workplace() {
        for (const char* name : {"files", "run"}) std::filesystem::create_directory(folder_ / name);
        std::filesystem::current_path(folder_ / "run");
    }
    ~Workplace() { std::filesystem::current_path(before_); }
    Workplace(const Workplace&) = delete;

    // The path of a file in `files`, from where the programs run: "../files/NAME".
    static std::string file(const std::string& name) { return "../files/" + name; }

    // Removes what is in the folder where the programs run.
    static void empty_folder() {
        for (const auto& entry : std::filesystem::directory_iterator(".")) std::filesystem::remove_all(entry);
    }

    // Calls a program. flags: separated by blanks; '' is an empty word.
    static void call(const std::string& program, const std::string& flags) {
        std::vector<std::string> words = split_at(program + " " + flags, ' ');
        std::vector<char*> argv;
        for (std::string& word : words) {
            if (word == "''") word.clear();
            argv.push_back(word.data());
        }
        argv.push_back(nullptr);
        call_program(program, int(words.size()), argv.data());
    }

    // Expects a usage error of one line with all that `says` lists, separated by |, every file and the memory as they
    // were, and no collective that has not ended.
    void refused(const std::string& program, const std::string& flags, const std::string& says) const {
        const auto files = contents();
        const int64_t memory = ledger().total();
        std::string wrong;
        try {
            const CatchChecks catching;
            call(program, flags);
            wrong = "not refused; ";
        } catch (const UsageError& error) {
            const std::string line = one_line(error.what());
            const bool escapes = line != error.what(), escape_expected = says.find("\\x") != says.npos;
            if (escapes && !escape_expected) wrong = "not one line; ";
            for (const std::string& part : split_at(says, '|'))
                if (line.find(part) == line.npos) wrong += fmt::format("'{}' is not in: {}; ", part, line);
        } catch (const CheckFailed&) { wrong = "a failed CHECK; "; } catch (const std::exception& error) {
            wrong = fmt::format("another error: {}; ", error.what());
        }
        for (const auto& [path, content] : contents())
            if (const auto before = files.find(path); before == files.end() || before->second != content)
                wrong += path + " is new or has changed; ";
        if (contents().size() < files.size()) wrong += "a file is gone; ";
        // The watchdog would end a later program for it.
        if (collective_log().text().find("NOT ENDED") != std::string::npos) wrong += "a collective is open; ";
        if (!wrong.empty()) empty_folder();
        if (ledger().total() != memory) wrong += fmt::format("{} bytes stay booked; ", ledger().total() - memory);
        DOCTEST_CHECK_MESSAGE(wrong.empty(), fmt::format("{} {}: {}", program, flags, wrong));
    }

  private:
    std::map<std::string, std::string> contents() const {  // by path
        namespace fs = std::filesystem;
        std::map<std::string, std::string> found;
        for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder_.path)) {
            const fs::file_status status = entry.symlink_status();
            found[entry.path().lexically_relative(folder_.path)] =
                status.type() == fs::file_type::regular   ? read_text(entry.path())
                : status.type() == fs::file_type::symlink ? "link to " + fs::read_symlink(entry.path()).string()
                                                          : fmt::format("type {}", int(status.type()));
        }
        return found;
    }

    const std::filesystem::path before_ = std::filesystem::current_path();
    Folder folder_;
    Quiet quiet_;
};

}  // namespace train70b::test
