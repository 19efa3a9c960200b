#include "01_single_gpu/complete/report/table.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "01_single_gpu/core/check.h"

namespace train70b {

Cell::Cell(std::string text, double raw) : text(std::move(text)), raw(fmt::format("{:.9g}", raw)) {}

Cell fixed(double number, int digits, const std::string& unit) {
    return {fmt::format("{:.{}f}{}", number, digits, unit), number};
}
Cell scientific(double number) { return {fmt::format("{:.2e}", number), number}; }
Cell milliseconds(double seconds) { return {fmt::format("{:.1f} ms", 1e3 * seconds), seconds}; }
Cell percent(double share, int digits) { return {fmt::format("{:.{}f}%", 100 * share, digits), share}; }

void Table::note(const std::string& line) { notes_.push_back(line); }

void Table::row(std::vector<Cell> cells) {
    CHECK(cells.size() <= columns_.size(), "{} cells in a row of {} columns", cells.size(), columns_.size());
    cells.resize(columns_.size());
    rows_.push_back(std::move(cells));
}

Table::Lines Table::shown() const {
    Lines lines(rows_.size() + 1);
    for (size_t i = 0; i < columns_.size(); ++i) {
        if (!columns_[i].in_text) continue;
        lines[0].push_back(columns_[i].name);
        for (size_t r = 0; r < rows_.size(); ++r) lines[r + 1].push_back(rows_[r][i].text);
    }
    return lines;
}

std::vector<bool> Table::aligned_left() const {
    std::vector<bool> left;
    for (const Column& column : columns_)
        if (column.in_text) left.push_back(left.empty() || column.align_left);
    return left;
}

std::string Table::text() const {
    const Lines lines = shown();
    const std::vector<bool> left = aligned_left();
    std::vector<size_t> widths(left.size());
    for (const auto& line : lines)
        for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
    std::string text = caption_.empty() ? "" : caption_ + "\n";
    for (const auto& line : lines) {
        for (size_t i = 0; i < line.size(); ++i) {
            const std::string padding(widths[i] - line[i].size(), ' ');
            text += (i == 0 ? "" : "  ") + (left[i] ? line[i] + padding : padding + line[i]);
        }
        text.erase(text.find_last_not_of(' ') + 1);
        text += "\n";
    }
    for (const std::string& note : notes_) text += note + "\n";
    return text;
}

std::string Table::csv() const {
    const auto quoted = [](std::string value) {
        if (value.find_first_of(",\"\n") == std::string::npos) return value;
        for (size_t at = 0; (at = value.find('"', at)) != std::string::npos; at += 2) value.insert(at, 1, '"');
        return '"' + value + '"';
    };
    Lines lines(rows_.size() + 1);
    for (size_t i = 0; i < columns_.size(); ++i) {
        if (!columns_[i].in_csv) continue;
        lines[0].push_back(quoted(columns_[i].csv));
        for (size_t r = 0; r < rows_.size(); ++r) lines[r + 1].push_back(quoted(rows_[r][i].raw));
    }
    std::string text;
    for (const auto& line : lines) text += fmt::format("{}\n", fmt::join(line, ","));
    return text;
}

std::string Table::markdown() const {
    Lines lines = shown();
    std::vector<std::string> rule;
    for (const bool left : aligned_left()) rule.push_back(left ? "---" : "--:");
    lines.insert(lines.begin() + 1, rule);
    std::string text = caption_.empty() ? "" : caption_ + "\n\n";
    for (const auto& line : lines) text += fmt::format("| {} |\n", fmt::join(line, " | "));
    for (const std::string& note : notes_) text += "\n" + note + "\n";
    return text;
}

}  // namespace train70b
