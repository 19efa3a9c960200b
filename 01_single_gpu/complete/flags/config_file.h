#pragma once
// The file of --config: lines NAME = VALUE in TOML, without sections. Only flags.cpp includes this.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/json.h"

namespace train70b {

// CLI11's own reader cuts a text at a # and drops what it cannot read.
class ConfigFile : public CLI::Config {
    using json = nlohmann::json;

  public:
    // Every option that was given.
    std::string to_config(const CLI::App* app, bool, bool, std::string) const override {
        std::string text;
        for (const CLI::Option* option : app->get_options()) {
            if (!option->get_configurable() || option->count() == 0) continue;
            const std::vector<std::string>& words = option->results();
            const bool one = words.size() == 1, plain = one && json::parse(words[0], nullptr, false).is_number();
            const std::string value = option->get_type_size() == 0 ? "true"
                                      : plain                      ? words[0]
                                                                   : json_text(one ? json(words[0]) : json(words));
            text += fmt::format("{} = {}\n", option->get_single_name(), value);
        }
        return text;
    }
    // Usage error "--config: line N: ..." for a line that is none.
    std::vector<CLI::ConfigItem> from_config(std::istream& file) const override {
        std::vector<CLI::ConfigItem> items;
        std::string line;
        for (int number = 1; std::getline(file, line); ++number) {
            line = without_blanks(without_comment(line));
            if (line.empty()) continue;
            const size_t equals = line.find('=');
            const std::string name = without_blanks(line.substr(0, equals));
            const auto value = equals == line.npos ? std::nullopt : value_of(without_blanks(line.substr(equals + 1)));
            if (!value)
                usage_error(
                    "--config: line {}: {}: must be NAME = VALUE; a value is a number, true, \"a text\" or [a, list], "
                    "and sections are none",
                    number, line);
            if (std::any_of(items.begin(), items.end(), [&](const auto& item) { return item.name == name; }))
                usage_error("--config: line {}: {}: is there twice", number, name);
            items.emplace_back();
            items.back().name = name;
            items.back().inputs = {*value};
        }
        return items;
    }

  private:
    static std::string without_blanks(const std::string& text) {
        const size_t begin = text.find_first_not_of(" \t\r"), end = text.find_last_not_of(" \t\r");
        return begin == text.npos ? "" : text.substr(begin, end - begin + 1);
    }

    static std::string without_comment(const std::string& line) {
        char quote = 0;
        for (size_t i = 0; i < line.size(); ++i) {
            const char c = line[i];
            if (quote == '"' && c == '\\')
                ++i;
            else if (quote != 0)
                quote = c == quote ? char(0) : quote;
            else if (c == '"' || c == '\'')
                quote = c;
            else if (c == '#')
                return line.substr(0, i);
        }
        return line;
    }

    // A TOML value as a flag's; a list as 1,2,3. Empty if it is none.
    static std::optional<std::string> value_of(const std::string& text) {
        if (text.size() >= 2 && text.front() == '\'' && text.find('\'', 1) == text.size() - 1)
            return text.substr(1, text.size() - 2);
        const json parsed = json::parse(text, nullptr, false);  // TOML's other values of one line are JSON's
        if (parsed.is_discarded() || parsed.is_null() || parsed.is_object()) return {};
        if (parsed.is_string()) return parsed.get<std::string>();
        if (!parsed.is_array()) return text;
        std::string list;
        for (const json& item : parsed)
            list += (list.empty() ? "" : ",") + (item.is_string() ? item.get<std::string>() : item.dump());
        return list;
    }
};

}  // namespace train70b
