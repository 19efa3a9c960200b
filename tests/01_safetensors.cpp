// safetensors files whose header lies: every kind of lie is refused by file and tensor, before anything is read.
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "01_single_gpu/complete/hf/safetensors.h"
#include "01_single_gpu/core/json.h"
#include "tests/files.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {
void write_raw(const std::string& path, const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    write_text(path, std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, '\1'));
}
}  // namespace

TEST_CASE("a file written is the file read: order, alignment, values; and nothing under its name before commit") {
    const Folder folder;
    const std::string path = folder / "x.safetensors";
    const Tensor a = tensor(randoms(6, 1), {2, 3}), b = tensor(randoms(5, 2), {5}, DType::bf16);
    {
        SafetensorsWriter file("--flag", path, {{"b", DType::bf16, {5}}, {"a", DType::f32, {2, 3}}});
        file.write(b);
        EXPECT(!std::filesystem::exists(path));
        file.write(a);
        file.commit();
    }
    const SafetensorsFile file(path);
    Tensor a_again({2, 3}, DType::f32, Device::cpu), b_again({5}, DType::bf16, Device::cpu);
    file.read(file.tensors().at("a"), a_again);
    file.read(file.tensors().at("b"), b_again);
    EXPECT(values(a) == values(a_again));
    EXPECT(values(b) == values(b_again));
    EXPECT(file.tensors().at("b").begin == 0);
    const std::string bytes = read_text(path);
    EXPECT(uint8_t(bytes[0]) % 8 == 0);
    EXPECT(bytes.size() % 8 == (6 * 4 + 5 * 2) % 8);
    { const SafetensorsWriter dropped("--flag", folder / "y.safetensors", {}); }
    EXPECT(folder.files() == 1);
    EXPECT_USAGE_ERROR(SafetensorsWriter("--flag", folder / "nowhere/x", {}), "--flag");
}

TEST_CASE("every fp16 number is read as it is, of a model; a checkpoint has none, and a model no bytes") {
    const Folder folder;
    const std::string path = folder / "x.safetensors";
    write_raw(path, R"({"a":{"dtype":"F16","shape":[256,256],"data_offsets":[0,131072]}})", 131072);
    EXPECT_USAGE_ERROR(SafetensorsFile{path}, "dtype \"F16\" is not supported (must be F64, F32, BF16 or U8)");
    std::string content = read_text(path);
    for (size_t i = 0; i < 65536; ++i) {
        content[content.size() - 131072 + 2 * i] = char(i & 255);
        content[content.size() - 131072 + 2 * i + 1] = char(i >> 8);
    }
    write_text(path, content);
    const SafetensorsFile file(path, Holds::model);
    const StoredTensor& stored = file.tensors().at("a");
    Tensor all({256, 256}, DType::f32, Device::cpu), part({2, 3}, DType::f64, Device::cpu);
    file.read(stored, all);
    for (int i = 0; i < 65536; ++i) {
        const double expected = fp16_value(uint16_t(i)), found = all.data<float>()[i];
        EXPECT((std::isnan(expected) ? std::isnan(found) : found == expected && std::signbit(found) == (i >= 32768)));
    }
    file.read(stored, {.row_begin = 60, .rows = 2, .col_begin = 5, .cols = 3}, part);
    EXPECT(values(part)[4] == fp16_value(61 * 256 + 6));
    write_raw(path, R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", 8);
    EXPECT_USAGE_ERROR(SafetensorsFile(path, Holds::model), "\"U8\" is not supported (must be F64, F32, F16 or BF16)");
}

TEST_CASE("JSON: 64 levels of nesting, no more") {
    EXPECT(parse_json(nested_lists(64), "here").is_array());
    EXPECT_USAGE_ERROR(parse_json(nested_lists(65), "here"), "here: nested deeper than 64 levels");
    EXPECT_USAGE_ERROR(parse_json(std::string(200'000, '['), "here"), "here: nested deeper");
    EXPECT_USAGE_ERROR(parse_json("[1, 2", "here"), "here: truncated or corrupt: byte 6 is not valid JSON");
    EXPECT_USAGE_ERROR(parse_json("{\"a\": NaN}", "here"), "here: truncated or corrupt: byte 7");
    EXPECT_USAGE_ERROR(parse_json("1e999", "here"), "here: has a number beyond 1e308");
    EXPECT_USAGE_ERROR(parse_json("{\"a\": {\"b\": 1, \"b\": 2}}", "here"), "here: lists \"b\" twice");
    EXPECT(parse_json("[{\"b\": 1}, {\"b\": {\"b\": 2}}]", "here").size() == 2);
    EXPECT(parse_json("[[], [], {\"a\": [1]}]", "here")[2]["a"][0] == 1);
}

TEST_CASE("an output goes to the end of its links, straight to a device, and to nothing that is no file") {
    const Folder folder;
    namespace fs = std::filesystem;
    const auto write = [&](const std::string& name) {
        OutputFile file("--out", folder / name);
        file.write(std::string("new"));
        file.commit();
    };
    write_text(folder / "file", "old");
    fs::create_symlink("file", folder / "link");
    fs::create_symlink(folder / "link", folder / "link2");
    fs::create_symlink("absent", folder / "dangling");
    write("link2");
    write("dangling");
    EXPECT(read_text(folder / "file") == "new");
    EXPECT(read_text(folder / "absent") == "new");
    for (const char* link : {"link", "link2", "dangling"}) EXPECT(fs::is_symlink(folder / link));
    fs::create_symlink("b", folder / "a");
    fs::create_symlink("a", folder / "b");
    EXPECT_USAGE_ERROR(write("a"), "circular symbolic links");
    fs::create_directory(folder / "folder");
    EXPECT_USAGE_ERROR(write("folder"), "folder: is a folder (must name a file)");
    EXPECT_USAGE_ERROR(write("new/"), "new/: is a folder");
    REQUIRE(mkfifo((folder / "fifo").c_str(), 0600) == 0);
    EXPECT_USAGE_ERROR(write("fifo"), "fifo: is a FIFO");
    EXPECT_USAGE_ERROR(OutputFile("--out", ""), "--out: empty path");
    if (mknod((folder / "null").c_str(), S_IFCHR | 0600, makedev(1, 3)) == 0) {  // as root only
        write("null");
        EXPECT(fs::is_character_file(folder / "null"));
    }
    EXPECT(folder.files() == 9 + fs::exists(folder / "null"));  // no temporary file
}

TEST_CASE("a file that becomes shorter is named; a message is one line of limited length") {
    const Folder folder;
    write_text(folder / "data", "12345678");
    const InputFile file("--data data", folder / "data", "must be a file");
    char bytes[8] = {};
    file.read(2, bytes, 6);
    EXPECT(std::string(bytes, 6) == "345678");
    std::filesystem::resize_file(folder / "data", 4);
    DOCTEST_CHECK_THROWS_WITH(file.read(2, bytes, 6), "--data data: has become shorter while it was in use");
    EXPECT_USAGE_ERROR(InputFile("x", folder.path, "must be a file"), "x: is not a regular file (must be a file)");
    EXPECT(one_line("a\nb\x1b[31m caf\xe9 caf\u00e9 \xed\xa0\x80") ==
           "a\\x0ab\\x1b[31m caf\\xe9 caf\u00e9 \\xed\\xa0\\x80");
    const std::string line = one_line("begin" + std::string(100'000, 'x') + "end");
    EXPECT((line.size() < 1600 && line.starts_with("begin") && line.ends_with("xend")));
}

TEST_CASE("no output may be an input or another output, by any of its names") {
    const Folder folder;
    const auto output = [&](const char* flag, const std::string& name) { return PathUse{flag, folder / name, true}; };
    const auto input = [&](const std::string& name) { return PathUse{"--data", folder / name, false}; };
    write_text(folder / "data", "data");
    write_text(folder / "log.tmp", "data");
    std::filesystem::create_symlink("data", folder / "link");
    std::filesystem::create_hard_link(folder / "data", folder / "hard");
    check_paths({input("data"), output("--a", "x"), output("--b", "y"), input("log.tmp")});
    check_paths({output("--a", "x"), {"--b", "/dev/null", true}, {"--c", "/dev/null", true}});
    for (const char* name : {"data", "link", "hard", "./data"})
        EXPECT_USAGE_ERROR(check_paths({input("data"), output("--a", "x"), output("--b", name)}), "which --data reads");
    EXPECT_USAGE_ERROR(check_paths({output("--a", "x"), output("--b", "./x")}), "--a writes the same file");
    EXPECT_USAGE_ERROR(check_paths({input("log.tmp"), output("--a", "log")}), "log.tmp, which --data reads");
    EXPECT_USAGE_ERROR(check_paths({output("--a", "x"), output("--b", "x.tmp")}), "is the temporary file of");
    EXPECT_USAGE_ERROR(check_paths({output("--a", "x.tmp"), output("--b", "x")}), "is the temporary file of");
    EXPECT_USAGE_ERROR(OutputFile("--a", folder / "log"), "log.tmp exists and would be overwritten");
    EXPECT(read_text(folder / "log.tmp") == "data");
    EXPECT(read_text(folder / "data") == "data");
}

TEST_CASE("a header that lies is refused by file and tensor") {
    const Folder folder;
    const std::string path = folder / "x.safetensors";
    write_raw(path, "{\"a\": {\"shape\": " + nested_lists(200'000) + "}}", 0);
    EXPECT_USAGE_ERROR(SafetensorsFile{path}, "x.safetensors: nested deeper than 64 levels");
    const auto entry = [](const std::string& name, const std::string& dtype, const std::string& shape, uint64_t begin,
                          uint64_t end) {
        return fmt::format("\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", name, dtype, shape,
                           begin, end);
    };
    const auto braced = [](std::initializer_list<std::string> parts) {
        return fmt::format("{{{}}}", fmt::join(parts, ","));
    };
    const auto a = entry("a", "F32", "[2,3]", 0, 24);
    const std::tuple<std::string, size_t, const char*> bad[] = {
        {braced({entry("a", "F32", "[2,3]", 0, 20)}), 20, "\"a\": \"F32\" of (2, 3) is 24 bytes"},
        {braced({entry("a", "F32", "[2,3]", 0, 28)}), 28, "\"a\""},
        {braced({a}), 23, "\"a\": ends at byte 24, but the file has 23"},
        {braced({a}), 28, "4 bytes after the last tensor"},
        {braced({a, entry("b", "F32", "[2]", 20, 28)}), 28, "\"b\" overlaps \"a\""},
        {braced({a, entry("b", "F32", "[6]", 0, 24)}), 24, "overlaps"},
        {braced({a, entry("b", "BF16", "[2]", 28, 32)}), 32, "4 bytes before tensor \"b\""},
        {braced({entry("a", "F32", "[2]", 4, 12)}), 12, "4 bytes before tensor \"a\""},
        {braced({entry("a", "F64", "[0,1152921504606846976]", 0, 0)}), 0,
         "\"a\": shape (0, 1152921504606846976) is too"},
        {braced({a, a}), 24, "lists \"a\" twice"},
        {braced({entry("a", "F16", "[2]", 0, 4)}), 4, "\"a\": dtype \"F16\" is not supported"},
        {braced({entry("a", "F32", "[-2,-3]", 0, 24)}), 24, "\"a\""},
        {braced({entry("a", "F32", "[2.0,3]", 0, 24)}), 24, "\"a\""},
        {braced({entry("a", "F32", "6", 0, 24)}), 24, "\"a\": \"shape\" is missing"},
        {braced({entry("a", "F32", "[4294967296,4294967296]", 0, 0)}), 0, "\"a\": shape"},
        {braced({entry("a", "F32", "[2]", 8, 0)}), 8, "\"a\": data_offsets must be"},
        {braced({entry("a", "F32", "[2]", 0, 18446744073709551615u)}), 8, "\"a\": ends at byte"},
        {braced({entry("a\\nb", "I64", "[1]", 0, 8)}), 8, "\"a\\nb\": dtype \"I64\""},
        {"{\"a\":7}", 0, "\"a\": \"shape\" is missing"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"a\": dtype null"},
        {"[]", 0, "not a JSON object"},
        {braced({a}).substr(1), 24, "not valid JSON"},
        {"", 24, "not valid JSON"},
        {"{}", 4, "4 bytes after"},
    };
    for (const auto& [header, data_bytes, part] : bad) {
        INFO(header);
        write_raw(path, header, data_bytes);
        EXPECT_USAGE_ERROR(SafetensorsFile(path), part);
        EXPECT_USAGE_ERROR(SafetensorsFile(path), "x.safetensors: ");
    }
    write_raw(path, braced({a, entry("b", "BF16", "[]", 24, 26), entry("c", "F32", "[0,5]", 24, 24)}), 26);
    EXPECT(SafetensorsFile(path).tensors().size() == 3);  // a scalar and an empty tensor are fine
    for (const std::string& text : {std::string(), std::string(7, 'x'), std::string(100, '\xff')}) {
        write_text(path, text);
        EXPECT_USAGE_ERROR(SafetensorsFile(path), "x.safetensors: ");
    }
    EXPECT_USAGE_ERROR(SafetensorsFile(folder.text()), "is not a regular file");
    EXPECT_USAGE_ERROR(SafetensorsFile(folder / "nowhere"), "nowhere: cannot be read");
}
