// One source of data: what is read from every kind of file, which samples it is cut into, and what is refused. Shards
// here hold the token i at place i, so that a sample tells where it was cut.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>

#include "01_single_gpu/complete/data/text_file.h"
#include "tests/data_folder.h"

using namespace train70b;
using namespace train70b::test;
namespace fs = std::filesystem;

TEST_CASE("a text file: one byte, one token, every byte as it is") {
    const DataFolder folder;
    std::string text;
    for (int byte = 254; byte >= 0; --byte) text += static_cast<char>(byte);  // newlines, zeros and the upper half too
    text += '\xff';  // not first: with 254 behind it, it would be UTF-16
    const Source data(folder.write("text.txt", text), 256, kSeq, 0);
    EXPECT(data.is_text());
    EXPECT(data.tokens() == 256);
    EXPECT(data.read(0, 256) == bytes_of(text));
    EXPECT(data.read(253, 3) == std::vector<int32_t>{1, 0, 255});
    EXPECT_CHECK_FAILS(data.read(250, 7));
    EXPECT_CHECK_FAILS(data.read(-1, 2));
}

TEST_CASE("files of other formats are no text; what is not UTF-8 is told") {
    using namespace std::string_view_literals;
    const DataFolder folder;
    const std::string zeros(100, '\0');
    for (const auto& [beginning, name] : {std::pair("\x93NUMPY\x01"sv, "a NumPy array (docs/convert_tokens.py"),
                                          {"PAR1"sv, "a Parquet file"},
                                          {"ARROW1\0\0"sv, "an Arrow file"},
                                          {"\x1f\x8b\x08"sv, "packed by gzip (unpack it first)"},
                                          {"\x28\xb5\x2f\xfd"sv, "packed by zstd"},
                                          {"PK\x03\x04"sv, "a zip archive"},
                                          {"%PDF-1.7"sv, "a PDF"},
                                          {"GGUF"sv, "a GGUF model"},
                                          {"\x60\0\0\0\0\0\0\0{\"a\":{}}"sv, "a safetensors file (a model: --load-hf"},
                                          {"MMIDIDX\0\0"sv, "an index of Megatron"},
                                          {"\xff\xfet\0"sv, "UTF-16 (convert it: iconv"}})
        for (const char* place : {"data.txt", "text/b.txt"}) {  // alone, or in a folder
            folder.write("text/a.txt", "a text");
            const std::string path = folder.write(place, std::string(beginning) + zeros);
            EXPECT_USAGE_ERROR(Source(place[0] == 'd' ? path : (folder.path / "text").string(), 256, kSeq, 0),
                               (path + ": is " + name).c_str());
        }
    EXPECT(known_format("") == "");
    EXPECT(known_format("P") == "");
    EXPECT(known_format("A text about PAR1 and GGUF") == "");
    EXPECT(share_not_utf8("a text\r\n\twith \xc3\xa9 and \xe2\x82\xac") == 0);
    EXPECT(share_not_utf8("cut within \xe2\x82") == 0);  // the first 64 KiB may end so
    EXPECT(share_not_utf8("caf\xe9 in Latin-1") == 1.0 / 15);
    EXPECT(share_not_utf8(zeros) > 0.9);
}

TEST_CASE("a folder of text: recursive, in the order of the names, without hidden files and folders") {
    const DataFolder folder;
    folder.write("text/b.txt", "the second ");  // written first: the order must not come from the disk
    folder.write("text/sub/deep/c.md", "the last");
    folder.write("text/a.txt", "the first ");
    folder.write("text/b0.txt", "");  // an empty file between others
    folder.write("text/.hidden.txt", "HIDDEN");
    folder.write("text/.git/config.txt", "HIDDEN");
    folder.write("text/sub/.swap", "HIDDEN");
    const Source data((folder.path / "text").string(), 256, kSeq, 0);
    EXPECT(data.is_text());
    EXPECT(data.tokens() == 29);
    EXPECT(data.read(0, 29) == bytes_of("the first the second the last"));
    EXPECT(data.read(8, 4) == bytes_of("t th"));  // across the border of two files
}

TEST_CASE("token shards of uint16 and of uint32") {
    const DataFolder folder;
    std::vector<int32_t> tokens = {0, 1, 255, 256, 32767, 32768, 65535};
    tokens.resize(20, 7);
    const Source narrow(folder.write("narrow.bin", shard<uint16_t>(tokens)), 65536, kSeq, -1);
    EXPECT(!narrow.is_text());
    EXPECT(narrow.tokens() == 20);
    EXPECT(narrow.read(0, 20) == tokens);

    tokens[3] = 65536;
    tokens[4] = 128255;
    tokens[19] = 2147483647;
    const Source wide(folder.write("wide.bin", shard<uint32_t>(tokens)), int64_t(1) << 32, kSeq, -1);
    EXPECT(wide.tokens() == 20);
    EXPECT(wide.read(0, 20) == tokens);
}

TEST_CASE("a folder of shards is one stream; samples cross the borders of files") {
    const DataFolder folder;
    folder.write("shards/train_2.bin", shard<uint32_t>(counting(25, 75)));  // widths may differ
    folder.write("shards/train_0.bin", shard<uint16_t>(counting(0, 20)));
    folder.write("shards/train_1.bin", shard<uint16_t>(counting(20, 5)));  // shorter than a sample
    folder.write("shards/train_1b.bin", shard<uint16_t>({}));
    folder.write("shards/README.md", "not tokens");
    const Source data((folder.path / "shards").string(), 100, kSeq, -1);
    EXPECT(!data.is_text());
    REQUIRE(data.tokens() == 100);
    EXPECT(data.read(0, 100) == counting(0, 100));
    int over_three_files = 0;
    for (int64_t i = 0; i < 10 * data.samples_per_epoch(); ++i) {
        const std::vector<int32_t> sample = data.window(1, i);
        EXPECT(sample == counting(sample[0], kSeq + 1));
        over_three_files += sample[0] < 20 && sample[0] + kSeq >= 25;
    }
    EXPECT(over_three_files > 0);
}

TEST_CASE("an epoch visits every window of the training part once and nothing else") {
    const DataFolder folder;
    const Source data(folder.write("count.bin", shard<uint16_t>(counting(0, 1000))), 1000, kSeq, 0.1);
    REQUIRE(data.train_tokens() == 900);
    REQUIRE(data.samples_per_epoch() == 55);  // 899 targets hold 56 windows; one is left for the alignment
    std::set<int64_t> alignments, covered;
    for (uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10})
        for (int64_t epoch = 0; epoch < 10; ++epoch) {
            std::vector<int64_t> sorted = begins(data, seed, epoch);
            std::sort(sorted.begin(), sorted.end());
            const int64_t alignment = sorted[0];
            for (int64_t window = 0; window < 55; ++window) REQUIRE(sorted[window] == alignment + window * kSeq);
            REQUIRE(alignment >= 0);
            REQUIRE(sorted.back() + kSeq <= 899);  // the last target is a training token
            alignments.insert(alignment);
            for (int64_t t = sorted[0]; t <= sorted.back() + kSeq; ++t) covered.insert(t);
        }
    for (int64_t i = 0; i < 110; ++i) {
        const std::vector<int32_t> sample = data.window(3, i);
        EXPECT(sample == counting(sample[0], kSeq + 1));  // targets are the tokens moved by one
    }
    EXPECT(alignments.size() == 20);  // 899 - 55 * 16 = 19 tokens to spare: all twenty places
    EXPECT(covered.size() == 900);    // so that no training token is out of reach
}

TEST_CASE("samples stay inside the training part at every size of the source") {
    const DataFolder folder;
    for (int64_t total = kSeq + 1; total < 200; ++total) {
        const std::string path = folder.write("count.bin", shard<uint16_t>(counting(0, total)));
        for (double fraction : {0.0, 0.1, 0.5}) {
            const Source data(path, total, kSeq, fraction);
            REQUIRE(data.train_tokens() >= kSeq + 1);
            REQUIRE(data.samples_per_epoch() == std::max<int64_t>(1, (data.train_tokens() - 1) / kSeq - 1));
            for (int64_t epoch = 0; epoch < 8; ++epoch) {
                const std::vector<int64_t> places = begins(data, 1, epoch);
                REQUIRE(std::set<int64_t>(places.begin(), places.end()).size() == places.size());
                for (int64_t place : places) REQUIRE(place + kSeq < data.train_tokens());
            }
        }
    }
}

TEST_CASE("seeds and epochs have orders of their own") {
    const DataFolder folder;
    const Source data(folder.write("count.bin", shard<uint16_t>(counting(0, 1000))), 1000, kSeq, 0);
    std::set<std::vector<int64_t>> orders;
    for (uint64_t seed : {0, 1, 2, 3})
        for (int64_t epoch : {0, 1, 2, 1000000}) {
            std::vector<int64_t> order = begins(data, seed, epoch);
            EXPECT(!std::is_sorted(order.begin(), order.end()));
            const int64_t first = *std::min_element(order.begin(), order.end());
            for (int64_t& place : order) place -= first;  // another alignment alone is not another order
            orders.insert(order);
        }
    EXPECT(orders.size() == 16);
}

TEST_CASE("a sample depends on seed and index alone, not on the object or on earlier calls") {
    const DataFolder folder;
    const std::string path = folder.write("count.bin", shard<uint16_t>(counting(0, 1000)));
    const Source data(path, 1000, kSeq, 0.1), other(path, 1000, kSeq, 0.1);
    std::vector<std::vector<int32_t>> forwards, backwards;
    for (int64_t i = 0; i < 150; ++i) forwards.push_back(data.window(7, i));
    for (int64_t i = 149; i >= 0; --i) {
        other.window(8, 3 * i);
        backwards.insert(backwards.begin(), other.window(7, i));
    }
    EXPECT(forwards == backwards);
    EXPECT(data.window(~uint64_t(0), int64_t(1) << 50) == other.window(~uint64_t(0), int64_t(1) << 50));
}

TEST_CASE("seq_len + 1 tokens are one valid sample, also where a tenth would be held out") {
    const DataFolder folder;
    for (bool text : {true, false}) {
        const std::string path = text ? folder.write("short.txt", "seventeen bytes..")
                                      : folder.write("short.bin", shard<uint16_t>(bytes_of("seventeen bytes..")));
        const Source data(path, 256, kSeq, -1);
        EXPECT(data.train_tokens() == 17);
        EXPECT(data.samples_per_epoch() == 1);
        EXPECT(data.validation_samples() == 0);
        for (int64_t index : {0, 1, 99}) EXPECT(data.window(5, index) == bytes_of("seventeen bytes.."));
    }
}

TEST_CASE("validation lies behind the training part: a tenth of a text, nothing of shards, or what is asked for") {
    const DataFolder folder;
    std::string content;
    for (int i = 0; i < 1000; ++i) content += static_cast<char>(i % 251);
    const std::string text = folder.write("text.txt", content);
    const std::string tokens = folder.write("count.bin", shard<uint16_t>(counting(0, 1000)));

    const Source by_default(text, 256, kSeq, -1);
    EXPECT(by_default.train_tokens() == 900);
    REQUIRE(by_default.validation_samples() == 6);  // 99 targets
    for (int64_t i = 0; i < 6; ++i)
        EXPECT(by_default.validation_window(i) == bytes_of(content.substr(900 + i * kSeq, kSeq + 1)));

    const Source shards(tokens, 1000, kSeq, -1), quarter(tokens, 1000, kSeq, 0.25), none(text, 256, kSeq, 0);
    EXPECT(shards.train_tokens() == 1000);
    EXPECT(shards.validation_samples() == 0);
    EXPECT(quarter.train_tokens() == 750);
    REQUIRE(quarter.validation_samples() == 15);
    EXPECT(quarter.validation_window(0) == counting(750, kSeq + 1));
    EXPECT(quarter.validation_window(14) == counting(974, kSeq + 1));
    const Source even(folder.write("256.bin", shard<uint16_t>(counting(0, 256))), 256, kSeq, 0.25);
    EXPECT(even.validation_samples() == 3);  // 64 tokens: the last one is only a target
    EXPECT(none.train_tokens() == 1000);
    EXPECT(none.validation_samples() == 0);

    // A part that has no room for one sample is not made: 17 tokens are one, 16 are none.
    const Source just(folder.write("170.txt", std::string(170, 'a')), 256, kSeq, -1);
    const Source under(folder.write("169.txt", std::string(169, 'a')), 256, kSeq, -1);
    const Source greedy(folder.write("100.txt", std::string(100, 'a')), 256, kSeq, 0.9);
    EXPECT(just.train_tokens() == 153);
    EXPECT(just.validation_samples() == 1);
    EXPECT(under.train_tokens() == 169);
    EXPECT(greedy.train_tokens() == 100);
    EXPECT(greedy.validation_samples() == 0);
}

TEST_CASE("refused: what is missing, empty or too short") {
    const DataFolder folder;
    const std::string missing = (folder.path / "missing.txt").string(), hollow = (folder.path / "hollow").string();
    expect_refusal(refusal(missing), missing, "must be a text file, a folder of text, or .bin token shards");
    const std::string empty = folder.write("empty.txt", "");
    expect_refusal(refusal(empty), empty, "at least --seq-len + 1 = 17");
    folder.write("hollow/.only_hidden.txt", std::string(100, 'a'));
    expect_refusal(refusal(hollow), hollow, ".bin");  // what could be put there
    const std::string no_tokens = folder.write("none.bin", shard<uint16_t>({}));
    expect_refusal(refusal(no_tokens), no_tokens, "at least --seq-len + 1 = 17");

    const std::string brief = folder.write("short.txt", std::string(16, 'a'));
    expect_refusal(refusal(brief), brief, "try --seq-len 15");
    EXPECT(refusal(brief, 256, 15).empty());
    const std::string one = folder.write("one.txt", "a");
    expect_refusal(refusal(one), one, "1 token");
    EXPECT(refusal(one).find("--seq-len 0") == std::string::npos);  // no sequence has that length
}

TEST_CASE("refused: tokens outside the vocabulary, with the vocabulary that would hold them") {
    const DataFolder folder;
    const std::string text = folder.write("text.txt", std::string(40, 'a') + "z");
    expect_refusal(refusal(text, 100), text, "token 122 at position 40");
    expect_refusal(refusal(text, 90), text, "token 97 at position 0 is outside the vocabulary of 90 (try --vocab 123 ");
    expect_refusal(refusal(text, 122), text, "--vocab 123 or more");
    EXPECT(refusal(text, 123).empty());

    folder.write("shards/0.bin", shard<uint16_t>(counting(0, 50)));
    const std::string second = folder.write("shards/1.bin", shard<uint32_t>(counting(50, 50)));
    expect_refusal(refusal((folder.path / "shards").string(), 99), second, "--vocab 100 or more");
    const std::string negative = folder.write("negative.bin", shard<uint32_t>(std::vector<int32_t>(20, -1)));
    expect_refusal(refusal(negative, 1000), negative, "--vocab 4294967296 or more");
}

TEST_CASE("refused: damaged shards") {
    const DataFolder folder;
    const std::string whole = shard<uint16_t>(counting(0, 40));
    REQUIRE(whole.size() == 1104);
    REQUIRE(refusal(folder.write("whole.bin", whole)).empty());
    const auto expect_damaged = [&](const std::string& content, const std::string& hint) {
        const std::string path = folder.write("damaged.bin", content);
        expect_refusal(refusal(path), path, hint);
    };
    expect_damaged(whole.substr(0, 1103), "the header says 40 tokens, 1104 bytes in total, but the file has 1103");
    expect_damaged(whole.substr(0, 1024), "the header says 40 tokens, 1104 bytes in total, but the file has 1024");
    expect_damaged(whole + "xy", "the header says 40 tokens, 1104 bytes in total, but the file has 1106");
    expect_damaged(whole.substr(0, 1023), "1023 bytes, but a .bin shard begins with a header of 1024");
    expect_damaged("", "0 bytes, but a .bin shard begins with a header of 1024");
    expect_damaged(shard<uint16_t>(counting(0, 40), 20240519), "must be 20240520 for uint16 or 20240801 for uint32");
    expect_damaged(std::string(2000, 'a'), "must be 20240520 for uint16 or 20240801 for uint32");  // a text called .bin
    expect_damaged(shard<uint16_t>(counting(0, 40), kMagic16, 39), "the header says 39 tokens, 1102 bytes in total");
    expect_damaged(shard<uint16_t>(counting(0, 40), kMagic32), "version 1 of magic number 20240801 (must be 7)");
    expect_damaged(shard<uint32_t>(counting(0, 40)).substr(0, 1104), "the header says 40 tokens, 1184 bytes in total");
    expect_damaged(shard<uint16_t>({}, kMagic16, -1), "the header says -1 tokens");  // its size would match no tokens
    expect_damaged(shard<uint16_t>(counting(0, 40), kMagic16, 2147483647),
                   "the header says 2147483647 tokens, 4294968318 bytes");
}

TEST_CASE("masks: one byte per token, across the borders of shards") {
    const DataFolder folder;
    std::vector<int32_t> bytes;
    for (int i = 0; i < 100; ++i) bytes.push_back(i % 3 == 0 || i == 50);
    const auto part = [&](int64_t begin, int64_t end) {
        return mask(std::vector<int32_t>(bytes.begin() + begin, bytes.begin() + end));
    };
    folder.write("shards/0.bin", shard<uint16_t>(counting(0, 20)));
    folder.write("shards/1.bin", shard<uint16_t>(counting(20, 5)));
    folder.write("shards/2.bin", shard<uint32_t>(counting(25, 75)));
    const Source plain((folder.path / "shards").string(), 100, kSeq, 0.2);
    EXPECT(!plain.has_masks());
    folder.write("shards/0.mask.bin", part(0, 20));
    folder.write("shards/1.mask.bin", part(20, 25));
    folder.write("shards/2.mask.bin", part(25, 100));
    const Source data((folder.path / "shards").string(), 100, kSeq, 0.2);
    REQUIRE(data.has_masks());
    EXPECT(data.tokens() == 100);
    EXPECT(data.read(0, 100) == counting(0, 100));
    EXPECT(data.read_mask(0, 100) == std::vector<uint8_t>(bytes.begin(), bytes.end()));
    EXPECT(data.read_mask(18, 9) == std::vector<uint8_t>(bytes.begin() + 18, bytes.begin() + 27));
    for (int64_t i = 0; i < 20; ++i) EXPECT(data.window(1, i) == plain.window(1, i));
    EXPECT_CHECK_FAILS(data.read_mask(95, 6));
    EXPECT_CHECK_FAILS(plain.read_mask(0, 1));
    const Source one((folder.path / "shards/2.bin").string(), 100, kSeq, 0);  // a single file's mask lies beside it
    REQUIRE(one.has_masks());
    EXPECT(one.read_mask(0, 3) == std::vector<uint8_t>{0, 0, 1});
}

TEST_CASE("refused: masks that do not fit") {
    const DataFolder folder;
    const std::vector<int32_t> ones(40, 1);
    const std::string path = folder.write("a.bin", shard<uint16_t>(counting(0, 40)));
    const auto expect_mask_refused = [&](const std::string& content, const std::string& hint) {
        const std::string name = folder.write("a.mask.bin", content);
        expect_refusal(refusal(path), name, hint);
    };
    folder.write("a.mask.bin", mask(ones));
    EXPECT(refusal(path).empty());
    expect_mask_refused(mask(std::vector<int32_t>(39, 1)), "a mask of 39 tokens, but " + path + " has 40");
    expect_mask_refused(mask(ones, kMagic16), "must be 20261122 for a mask");
    expect_mask_refused(mask(ones, 20261122, 2), "version 2");
    expect_mask_refused(mask(ones).substr(0, 1063), "truncated or corrupt");
    expect_mask_refused(mask(ones).substr(0, 1000), "truncated");
    std::vector<int32_t> other = ones;
    other[17] = 2;
    expect_mask_refused(mask(other), "2 at position 17 (must be 0 or 1)");

    const std::string alone = folder.write("alone/a.mask.bin", mask(ones));
    expect_refusal(refusal(alone), alone, "is a mask, but " + (folder.path / "alone/a.bin").string() + " is not there");
    expect_refusal(refusal((folder.path / "alone").string()), alone, "is a mask");
    folder.write("some/a.bin", shard<uint16_t>(counting(0, 40)));
    const std::string bare = folder.write("some/b.bin", shard<uint16_t>(counting(0, 40)));
    folder.write("some/a.mask.bin", mask(ones));
    expect_refusal(refusal((folder.path / "some").string()), bare, "must be all or none");
}

TEST_CASE("data that changes under the run: one line that names the file") {
    const DataFolder folder;
    const auto error_of = [](const Source& data, int64_t begin) {
        try {
            data.read(begin, 10);
        } catch (const UsageError& error) {  // not at this time
            return std::string("usage error");
        } catch (const std::runtime_error& error) { return std::string(error.what()); }
        return std::string();
    };
    const std::string path = folder.write("count.bin", shard<uint16_t>(counting(0, 1000)));
    const Source open(path, 1000, kSeq, 0), all_fit(path, 1 << 16, kSeq, 0), late(path, 1 << 16, kSeq, 0),
        longer(path, 1 << 16, kSeq, 0), gone(path, 1 << 16, kSeq, 0);
    EXPECT(open.read(500, 3) == counting(500, 3));
    fs::resize_file(path, 1024 + 2 * 600);
    EXPECT(error_of(open, 100).empty());
    EXPECT(error_of(open, 595) == "--data " + path + ": has become shorter while it was in use");
    EXPECT(error_of(late, 0) == "--data " + path + ": has become shorter while it was in use");  // opened only now
    fs::resize_file(path, 1024 + 2 * 1001);
    EXPECT(error_of(longer, 0) == "--data " + path + ": has become longer while it was in use");
    fs::remove(path);
    EXPECT(error_of(open, 100).empty());  // still open
    EXPECT(error_of(gone, 0) == "--data " + path + ": has vanished while it was in use");
}

TEST_CASE("more shards than files may be open, read by two threads") {
    const DataFolder folder;
    constexpr int64_t kShards = 1000;
    for (int64_t i = 0; i < kShards; ++i)
        folder.write(fmt::format("shards/{:04}.bin", i), shard<uint16_t>(counting(20 * i, 20)));
    struct Limit {  // of open files, for this test
        rlimit before{};
        Limit() {
            REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
            const rlimit low = {200, before.rlim_max};
            REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
        }
        ~Limit() { ::setrlimit(RLIMIT_NOFILE, &before); }
    } const limit;
    const Source data((folder.path / "shards").string(), 65536, kSeq, 0);
    REQUIRE(data.tokens() == 20 * kShards);
    const auto open_files = [] {
        return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
    };
    std::atomic<int64_t> wrong = 0;
    const auto read = [&](int64_t first) {
        for (int64_t i = first; i < 2 * data.samples_per_epoch(); i += 2) {
            const std::vector<int32_t> sample = data.window(1, i);
            wrong += sample != counting(sample[0], kSeq + 1);
        }
    };
    std::thread other([&] { read(1); });
    read(0);
    other.join();
    EXPECT(wrong == 0);
    EXPECT(open_files() <= 50 + 10);
}
