#include "01_single_gpu/complete/flags/flags.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/flags/config_file.h"
#include "01_single_gpu/core/number.h"
#include "01_single_gpu/core/registry.h"
#include "01_single_gpu/core/version.h"

namespace train70b {

namespace {
// The Levenshtein distance.
size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = std::exchange(row[0], i);
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

std::string nearest_flag(const CLI::App& app, const std::string& unknown) {
    std::string best = "--help";
    size_t distance = unknown.size() / 2;  // what is farther is another word, or another chapter's flag
    for (const CLI::Option* option : app.get_options()) {
        const std::string name = option->get_name();
        if (const size_t d = edit_distance(name, unknown); d < distance) distance = d, best = name;
    }
    return best;
}

// One line "--flag VALUE   text [default: X]" per flag, wrapped after long names.
class HelpFormatter : public CLI::Formatter {
  public:
    HelpFormatter() { column_width(34); }
    std::string make_option_opts(const CLI::Option* option) const override {
        return option->get_type_size() == 0 ? "" : " " + option->get_type_name();
    }
    std::string make_option_desc(const CLI::Option* option) const override {
        const std::string text = option->get_description(), value = option->get_default_str();
        return text.find("[default: ") != text.npos || value.empty() ? text
                                                                     : fmt::format("{} [default: {}]", text, value);
    }
};
}  // namespace

Check integer_from(int64_t min, int64_t max) {
    const bool bounded = max < kMaxCount;
    return {[=](const std::string& text) {
                // Digits only. A leading zero is an error, because it could mean octal.
                const std::string digits = text.substr(text.starts_with('-') ? 1 : 0);
                const bool plain = !digits.empty() && digits.find_first_not_of("0123456789") == std::string::npos &&
                                   (digits.size() == 1 || digits[0] != '0');
                int64_t value = max;
                bool large = false;
                try {
                    if (plain) value = std::stoll(text);
                } catch (const std::out_of_range&) { large = true; }
                return plain && !large && value >= min && value <= max ? std::string()
                       : bounded || value > max || large
                           ? fmt::format("{} must be an integer from {} to {}", text, min, max)
                           : fmt::format("{} must be an integer >= {}", text, min);
            },
            "INT"};
}

Check real_number(double min, double max, bool min_allowed) {
    return {[=](const std::string& text) {
                const double value = parse_number(text).value_or(kInfinity);
                if (std::isfinite(value) && (min_allowed ? value >= min : value > min) && value <= max)
                    return std::string();
                return fmt::format("{} must be a number {} {}{}", text, min_allowed ? ">=" : ">", min,
                                   max < kInfinity ? fmt::format(" and <= {}", max) : "");
            },
            "NUMBER"};
}

Check one_of(std::vector<std::string> names) {
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "" : "|") + name;
    return {[names, list](const std::string& text) {
                return std::find(names.begin(), names.end(), text) != names.end()
                           ? std::string()
                           : fmt::format("{} is unknown; must be one of {}", text, list);
            },
            list};
}

Flags::Flags(const std::string& description)
    : app_(std::make_unique<CLI::App>(description)), values_(std::make_unique<nlohmann::ordered_json>()) {
    app_->formatter(std::make_shared<HelpFormatter>());
    app_->get_help_ptr()->description("print this help and exit");
    app_->set_version_flag("--version", build_commit(), "print the commit of the build and exit");
    app_->config_formatter(std::make_shared<ConfigFile>());
    app_->set_config("--config", "", "read flags from this file, a line NAME = VALUE each; the command line's win")
        ->type_name("FILE.toml")
        ->configurable(false)
        ->check([](const std::string& path) {  // to open a FIFO would wait for its other end
            std::error_code error;
            if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error))
                usage_error("--config {}: is not a regular file", path);
            return std::string();
        });
    app_->allow_config_extras(CLI::config_extras_mode::error);
    app_->add_flag("--print-config")
        ->description("print the flags that are given, as --config reads them, and exit")
        ->configurable(false);
}
Flags::~Flags() = default;

Flags::Flag& Flags::Flag::text(const std::string& description) {
    option_->description(description);
    return *this;
}

Flags::Flag& Flags::Flag::default_text(const std::string& text) {
    option_->default_str(text);
    return *this;
}

Flags::Flag Flags::checked(CLI::Option* option, const Check& check) {
    if (check.problem)
        option->check(CLI::Validator([problem = check.problem](std::string& text) { return problem(text); }, ""));
    if (!check.name.empty()) option->type_name(check.name);
    option->group(group_);
    return Flag(option);
}

// Of a list of such items, 1,2,3.
static Check each_of(const Check& item) {
    return {[problem = item.problem](const std::string& list) {
                for (const std::string& entry : items_of(list))
                    if (std::string wrong = problem ? problem(entry) : ""; !wrong.empty()) return wrong;
                return std::string();
            },
            item.name + ",..."};
}

template <class T>
Flags::Flag Flags::add(const std::string& name, T& value, const std::string& text, const Check& check) {
    constexpr bool kIntegers = std::is_same_v<T, std::vector<int64_t>>;
    if constexpr (kIntegers || std::is_same_v<T, std::vector<std::string>>) {
        const auto read = [&value](const std::string& list) {
            value.clear();
            for (const std::string& item : items_of(list))
                if constexpr (kIntegers)
                    value.push_back(std::stoll(item));
                else
                    value.push_back(item);
        };
        return add_word(name, read, text, each_of(check));
    } else {
        return checked(app_->add_option(name, value, text)->capture_default_str(), check);
    }
}
template Flags::Flag Flags::add(const std::string&, int&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, int64_t&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, uint64_t&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, double&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, std::string&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, std::optional<int64_t>&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, std::vector<int64_t>&, const std::string&, const Check&);
template Flags::Flag Flags::add(const std::string&, std::vector<std::string>&, const std::string&, const Check&);

Flags::Flag Flags::add_switch(const std::string& name, bool& value, const std::string& text) {
    return add_word(
               name, [&value](const std::string& word) { value = word == "on"; }, text, one_of({"on", "off"}))
        .default_text(value ? "on" : "off");
}

Flags::Flag Flags::add_flag(const std::string& name, bool& value, const std::string& text) {
    return checked(app_->add_flag(name, value, text), {});
}

Flags::Flag Flags::add_word(const std::string& name, const std::function<void(const std::string&)>& use,
                            const std::string& text, const Check& check) {
    return checked(app_->add_option_function<std::string>(name, use, text), check);
}

Flags::Flag Flags::at(const std::string& name) { return Flag(app_->get_option(name)); }

bool Flags::given(const std::string& name) const { return app_->count(name) > 0; }

void Flags::parse(int argc, char** argv) {
    app_->name(std::filesystem::path(argv[0]).filename().string());
    app_->allow_extras();           // unknown flags are reported below
    for (int i = 1; i < argc; ++i)  // CLI11 would take the next word for the value
        if (const std::string word = argv[i]; word.starts_with("--") && word.find('=') == word.size() - 1)
            usage_error("{}: the value is missing (--flag VALUE or --flag=VALUE)", word);
    try {
        app_->parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        if (this_rank == 0) std::fputs(app_->help().c_str(), stdout);
        throw EarlyEnd();
    } catch (const CLI::CallForVersion&) {
        if (this_rank == 0) fmt::print("{}: commit {}\n", app_->get_name(), build_commit());
        throw EarlyEnd();
    } catch (const CLI::FileError& error) {
        usage_error("--config: {}", error.what());
    } catch (const CLI::ConfigError& error) {
        const std::string file = app_->get_config_ptr()->as<std::string>(), text = error.what();
        constexpr std::string_view kUnknown = "INI was not able to parse ";
        if (!text.starts_with(kUnknown)) usage_error("--config {}: {}", file, text);
        const std::string key = text.substr(kUnknown.size());
        usage_error("--config {}: {}: unknown flag; did you mean {}? (--help lists all flags)", file, key,
                    nearest_flag(*app_, "--" + key).substr(2));
    } catch (const CLI::ParseError& error) { usage_error("{}", error.what()); }
    if (const auto extras = app_->remaining(); !extras.empty()) {
        if (extras[0].starts_with("-"))
            usage_error("{}: unknown flag; did you mean {}? (--help lists all flags)", extras[0],
                        nearest_flag(*app_, extras[0]));
        usage_error("{}: unexpected argument; values follow a flag: --flag value (--help lists all flags)", extras[0]);
    }
    const std::string config = app_->config_to_str();
    if (app_->count("--print-config")) {
        if (this_rank == 0) fmt::print("# {}\n{}", app_->get_name(), config);
        throw EarlyEnd();
    }
    for (const CLI::Option* option : app_->get_options()) {
        if (!option->get_configurable()) continue;
        std::string value = option->count() ? option->results().front() : option->get_default_str();
        for (size_t i = 1; i < option->results().size(); ++i) value += "," + option->results()[i];
        (*values_)[option->get_name().substr(option->get_positional() ? 0 : 2)] = value;
    }
    (*values_)["config"] = config;
}

const nlohmann::ordered_json& Flags::values() const { return *values_; }
void Flags::record(const std::string& name, const std::string& value) { (*values_)[name.substr(2)] = value; }

}  // namespace train70b
