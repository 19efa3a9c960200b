// Checkpoints that chapter 08 does not go on from: refused before anything is touched. And the flags about them.
#include <sys/stat.h>
#include <zlib.h>

#include <nlohmann/json.hpp>

#include "tests/refusals.h"

using namespace train70b;
using namespace train70b::test;
namespace fs = std::filesystem;

namespace {

const std::string kProgram = "08_3d_full";
const std::string kShape =
    "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 259 --seq-len 32 "
    "--global-batch 8 --init-std 0.1 --lr 0.001 --steps 8 --metrics m.jsonl";
const std::string kResume = "--resume --checkpoint-dir ck", kOlder = "(try --resume-from ck/step-2)";
const std::string kManifest = "ck/step-4/manifest.json", kTensors = "ck/step-4/rank-00000.safetensors";

// Each step and its loss.
std::vector<double> losses(const std::string& path) {
    std::ifstream stream(path);
    std::vector<double> found;
    for (std::string line; std::getline(stream, line);)
        if (const auto event = nlohmann::json::parse(line); event["event"] == "step")
            found.insert(found.end(), {double(event["step"]), event["loss"]});
    return found;
}

struct Row {
    std::string says;
    std::function<void()> change = {};  // before the program starts
    std::string flags = kResume;        // which replace the shape's
};

// Flags and what the line says.
Row flags(const std::string& flags, const std::string& says) { return {says, {}, flags}; }

// A folder of checkpoints, ck, that is made anew for each case.
class Checkpoints {
  public:
    Checkpoints() {
        Workplace::call(kProgram, completed("--metrics /dev/null --stop-after 4 --checkpoint-every 2 --weights-every 2 "
                                            "--checkpoint-dir ../files/base",
                                            kShape));
        fs::remove("../files/base/.lock");  // one that a refused run makes is seen
    }
    void renew() const {
        Workplace::empty_folder();
        fs::copy("../files/base", "ck", fs::copy_options::recursive);
    }
    // The losses of step 5 from a checkpoint with this manifest.
    std::vector<double> resumed(const std::string& manifest) const {
        renew();
        write_text(kManifest, manifest);
        Workplace::call(kProgram, completed("--stop-after 5 --resume-from ck/step-4", kShape));
        return losses("m.jsonl");
    }
    void refused(const std::vector<Row>& rows) const {
        for (const auto& [says, change, flags] : rows) {
            renew();
            if (change) change();
            place.refused(kProgram, completed(flags, kShape), says);
        }
    }

    const Workplace place;
};

// Replaces the first value of the key in the manifest by any text.
void set_value(const std::string& key, const std::string& value) {
    const std::string text = read_text(kManifest), start = fmt::format("\"{}\": ", key);
    DOCTEST_REQUIRE_MESSAGE(text.find(start) != text.npos, key);
    const size_t begin = text.find(start) + start.size();
    size_t end = begin;
    for (int depth = 0; depth > 0 || (text[end] != ',' && text[end] != '\n'); ++end)
        depth += int(text[end] == '{' || text[end] == '[') - int(text[end] == '}' || text[end] == ']');
    write_text(kManifest, text.substr(0, begin) + value + text.substr(end));
}

using Json = nlohmann::ordered_json;

// The value at a JSON pointer of the manifest.
void set(const std::string& at, const Json& value) {
    Json manifest = Json::parse(read_text(kManifest));
    manifest[Json::json_pointer(at)] = value;
    write_text(kManifest, manifest.dump(1));
}

Json at(const std::string& place) { return Json::parse(read_text(kManifest))[Json::json_pointer(place)]; }

// The same as a row.
Row edited(const std::string& says, const std::string& place, const Json& value) {
    return {says, [=] { set(place, value); }};
}

// The tensors of rank 0's file.
struct Stored {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};
// Changes them, and the manifest so that it agrees.
void edit_tensors(const std::function<void(std::map<std::string, Stored>&)>& change) {
    const std::string file = read_text(kTensors);
    uint64_t size = 0;
    std::copy_n(file.data(), sizeof size, reinterpret_cast<char*>(&size));
    std::map<std::string, Stored> tensors;
    const auto header = Json::parse(file.substr(sizeof size, size));
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") continue;
        const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
        tensors[name] = {entry["dtype"], entry["shape"], file.substr(sizeof size + size + begin, end - begin)};
    }
    change(tensors);
    Json changed, names = Json::array();
    std::string data;
    for (const auto& [name, stored] : tensors) {
        changed[name] = {{"dtype", stored.dtype},
                         {"shape", stored.shape},
                         {"data_offsets", {data.size(), data.size() + stored.bytes.size()}}};
        names.push_back(name);
        data += stored.bytes;
    }
    const std::string text = changed.dump();
    size = text.size();
    const std::string whole = std::string(reinterpret_cast<const char*>(&size), sizeof size) + text + data;
    write_text(kTensors, whole);
    set("/files/0/bytes", whole.size());
    set("/files/0/crc32", crc32(0, reinterpret_cast<const Bytef*>(whole.data()), uInt(whole.size())));
    set("/files/0/tensors", names);
}

}  // namespace

TEST_CASE("08: a checkpoint that is damaged") {
    const Checkpoints ck;
    const std::string file = "rank-00000.safetensors", no_file = file + ": missing, or not a regular file";
    const auto instead = [](const std::string& path, const std::function<void()>& make) {
        fs::remove(path);
        if (make) make();
    };
    const auto fifo = [] { REQUIRE(::mkfifo(kManifest.c_str(), 0600) == 0); };
    ck.refused({
        {kTensors + ": has |truncated|" + kOlder, [] { fs::resize_file(kTensors, fs::file_size(kTensors) - 100); }},
        {kTensors + ": missing|" + kOlder, [] { fs::remove(kTensors); }},
        {no_file, [=] { instead(kTensors, [] { fs::create_directory(kTensors); }); }},
        {no_file, [=] { instead(kTensors, [] { fs::create_symlink("/dev/zero", kTensors); }); }},
        {kManifest + ": ", [=] { instead(kManifest, fifo); }},
        {kManifest + ": ", [] { fs::resize_file(kManifest, fs::file_size(kManifest) / 2); }},
    });
    for (const std::string& name :
         {std::string("../step-2/rank-00000.safetensors"), std::string("/etc/passwd"), "sub/" + file, std::string("."),
          std::string(".."), std::string(), std::string("x\0y", 3), std::string(".lock")})
        ck.refused({edited(kManifest + ": |" + kOlder, "/files/0/name", name)});
    ck.refused({edited(kManifest + ": |new\\x0aline|" + kOlder, "/files/0/name", "new\nline")});
    for (const std::string& text : {std::string("step 4"), std::string(), std::string("[]"), nested_lists(100'000)})
        ck.refused({{kManifest + ": |" + (text == "[]" ? "not a JSON object" : kOlder),
                     [&] { write_text(kManifest, text); }}});

    const std::string values =
        R"(step=0 step=-4 step=4.5 step=5 step=99999999999999999999999 step=1e400 step=null step="4" version=-1 )"
        R"(ranks=0 next_sample=31 dtype="bf16" dtype="fp8" optimizer="adamw8bit" bytes=-1 )"
        R"(bytes=9223372036854775808 crc32=4294967296 crc32=-1 num_hidden_layers=9999999999 hidden_size=0 )"
        R"(num_attention_heads=7 rms_norm_eps=NaN rope_theta=2.0 rope_scaling={"rope_type":"llama3","factor":8.0,)"
        R"("low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64} )"
        R"(flags={} data={} files={} model=null tensors=[1])";
    for (const std::string& pair : split_at(values, ' ')) {
        const size_t cut = pair.find('=');
        ck.refused({{"ck/step-4", [&] { set_value(pair.substr(0, cut), pair.substr(cut + 1)); }}});
    }
}

TEST_CASE("08: a manifest that is not of its files") {
    const Checkpoints ck;
    const std::string tensors = "/files/0/tensors", first = "/files/0/tensors/0";
    ck.refused({
        {"overlap|" + kOlder, [&] { set(tensors + "/-", at(first)); }},
        {"elements are in no file|" + kOlder,
         [&] {
             Json names = at(tensors);
             names.erase(0);
             set(tensors, names);
         }},
        {"velocity/",
         [&] {
             const std::string name = at(first);
             set(first, "velocity" + name.substr(name.find('/')));
         }},
        edited("is not a parameter of the model", first, "weight/model.tokens.weight[0:259,0:32]"),
        edited("but the parameter is", first, "weight/model.norm.weight[0:999]"),
        edited("is not part of a full checkpoint", first, "weight/model.norm.weight[5:2]"),
        edited(kManifest + ": ", first, "weight/model.norm.weight[0:999999999999999999]"),
        {"overlap", [] { set("/files/-", at("/files/0")); }},
        edited("elements are in no file", "/files", Json::array()),
        edited("format version 2, but this program reads version 1", "/version", 2),
        edited("its format is", "/format", "x"),
        edited("kind \"some\": is unknown", "/kind", "some"),
        edited("is not part of a weights checkpoint", "/kind", "weights"),
        edited("ranks 1000000000000: \"files\" lists 1", "/ranks", 1000000000000),
        edited("blas_core 5: must be a string", "/blas_core", 5),
        {"ck/step-9/manifest.json: step 4: the folder is step-9 (rename", [] { fs::rename("ck/step-4", "ck/step-9"); }},
        {kManifest + ": step 2: the folder is step-4",
         [] {
             fs::rename("ck/step-4", "ck/step-3");
             fs::rename("ck/step-2", "ck/step-4");
             fs::rename("ck/step-3", "ck/step-2");
         }},
    });
    const std::string corrupt = "corrupt: \"next_sample\" is not that of \"step\", --global-batch and \"batches\"";
    for (const auto& [batches, says] :
         {std::pair(R"([{"from_step":2,"global_batch":8}])", kManifest + ": from_step 2"),
          {R"([{"from_step":1,"global_batch":4},{"from_step":5,"global_batch":8}])", kManifest + ": from_step 5"},
          {R"([{"from_step":1,"global_batch":8},{"from_step":1,"global_batch":8}])", kManifest + ": from_step 1"},
          {R"([{"from_step":1,"global_batch":16},{"from_step":3,"global_batch":8}])", corrupt},
          {R"([{"from_step":1,"global_batch":12},{"from_step":3,"global_batch":4}])", corrupt},
          {R"([{"from_step":1,"global_batch":0}])", kManifest + ": global_batch 0"},
          {R"([8])", kManifest},
          {R"(8)", kManifest + ": batches"}})
        ck.refused({edited(says, "/batches", Json::parse(batches))});
    for (const std::string flag : {"batch-ramp", "seq-ramp", "document-token", "mup"})
        for (const Json& value : {Json(8), Json::array({"8"})})
            ck.refused({edited(kManifest + ": flags: " + flag + "|must be a string", "/flags/" + flag, value)});

    // What agrees with its checksum, but not with what it says.
    using Tensors = std::map<std::string, Stored>;
    const auto stored = [&](const std::string& says, const std::function<void(Tensors&)>& change) {
        ck.refused({{"rank-00000.safetensors: tensor|" + says, [&] { edit_tensors(change); }}});
    };
    stored("must be fp32", [](Tensors& all) {
        for (auto& [name, x] : all) x.dtype = "F64", x.bytes += x.bytes;
    });
    stored("", [](Tensors& all) { all.begin()->second = {"F32", {1}, std::string(4, '\0')}; });  // unlike its rectangle
    stored("must be fp32", [](Tensors& all) {
        for (auto& [name, x] : all)
            if (name.starts_with("exp")) x.dtype = "U8", x.bytes.resize(x.bytes.size() / 4);
    });
    stored("", [](Tensors& all) { all["scale/model.norm.weight[0:32]"] = {"F32", {2, 1}, std::string(8, '\0')}; });
}

TEST_CASE("08: a checkpoint of another run") {
    const Checkpoints ck;
    const auto changed = [&](const std::string& other, const std::string& says) {
        ck.refused({{says, {}, other + " " + kResume}});
    };
    for (const std::string flags :
         {"--layers 4", "--hidden 64", "--heads 2", "--kv-heads 4", "--ffn 64", "--vocab 260"})
        changed(flags, "a checkpoint of another model: its " + split_at(flags, ' ')[0] + " is");
    changed("--tied-embeddings on",
            "a checkpoint of another model: its --tied-embeddings is off, but this run's is on (try --tied-embeddings "
            "off)");
    for (const std::string flags :
         {"--dtype bf16", "--dtype fp64 --grad-dtype fp64", "--optimizer adamw8bit", "--seed 2", "--seq-len 16",
          "--val-fraction 0.2", "--fp8 current", "--document-token 10"})
        changed(flags, split_at(flags, ' ')[0] + " ");
    const std::string ramp = "--seq-ramp 8:32:2 --global-batch 4 " + kResume;
    ck.refused({{"--global-batch 4: the checkpoint ck/step-4 is of a run with --global-batch 8 and a ramp (try that)",
                 [] { set("/flags/seq-ramp", "8:32:2"); }, ramp}});
    std::string text = "Another text, which is long enough for some samples:";
    for (int i = 1; i < 1000; ++i) text += fmt::format(" {}", i);
    write_text(Workplace::file("text.txt"), text);
    changed("--data ../files/text.txt", "--data ../files/text.txt: is not the data of the checkpoint ck/step-4");
}

TEST_CASE("08: flags of checkpoints") {
    const Checkpoints ck;
    write_text(Workplace::file("text.txt"), "a text");
    const auto only = [](const std::function<void()>& make) {
        return [=] {
            fs::remove_all("ck");
            make();
        };
    };
    const std::string here = "--checkpoint-dir ck ", none = "--resume: ck has no complete checkpoint";
    ck.refused({
        flags("--resume-from ck", "ck: is not a checkpoint: it has no manifest.json (must be DIR/step-N)"),
        {"is not a checkpoint", [] { fs::create_directory("ck/step-9.tmp"); }, "--resume-from ck/step-9.tmp"},
        flags("--resume-from nothing", "nothing: is not a folder"),
        flags("--resume-from ../files/text.txt", "text.txt: is not a folder"),
        flags("--resume-from ck/weights-4",
              "ck/weights-4: holds the weights only; a run goes on from a full checkpoint"),
        {none, only([] {})},
        {none, only([] { fs::create_directory("ck"); })},
        {none, only([] { fs::create_directories("ck/step-4.tmp"); })},  // what a crash leaves
        flags(here + "--resume-from ck/step-2",
              "--checkpoint-dir ck: has checkpoints up to step-4, which a run from ck/step-2 would overwrite"),
        flags(here + "--resume --resume-from ck/step-2",
              "--resume: goes on from the newest checkpoint, --resume-from from ck/step-2 (use one of the two)"),
        {"ck/step-8: is of step 8, and --steps is 8 (try --steps 16)",
         [] {
             set("/step", 8);
             set("/next_sample", 64);
             fs::rename("ck/step-4", "ck/step-8");
         }},
        flags(here + "--keep 0", "--keep"),
        flags(here + "--resume --stop-after 9", "--stop-after 9: must be at most --steps 8"),
        flags("--checkpoint-dir ''", "--checkpoint-dir|empty path"),
        flags(here + "--comm fake --fake-world 4", "--checkpoint-dir ck: with --comm fake"),
        flags(here + "--resume --save-reference r", "--save-reference r: a reference run begins at step 1"),
        flags("--checkpoint-dir ../files/text.txt", "--checkpoint-dir ../files/text.txt"),
        flags("--checkpoint-dir /proc/checkpoints", "--checkpoint-dir /proc/checkpoints"),
    });
    for (const std::string flag :
         {"--checkpoint-every 2", "--weights-every 2", "--keep 2", "--after-checkpoint x", "--resume"})
        ck.refused({flags(flag, split_at(flag, ' ')[0] + ": needs --checkpoint-dir DIR")});
}

TEST_CASE("08: a manifest with a flipped bit or a value of another kind: refused, or the same losses") {
    const Checkpoints ck;
    const std::string good = read_text("../files/base/step-4/manifest.json");
    const std::vector<double> expected = ck.resumed(good);
    REQUIRE(expected.size() == 2);
    // Whether it is refused.
    const auto refused = [&](const std::string& manifest) {
        try {
            const std::vector<double> found = ck.resumed(manifest);
            EXPECT(found == expected);
            return false;
        } catch (const UsageError&) { EXPECT(!fs::exists("m.jsonl")); } catch (const std::exception& error) {
            DOCTEST_FAIL_CHECK(std::string(error.what()));
        }
        return true;
    };

    const size_t head = good.find("\"files\""), step = good.find("\"step\": 4") + 8;
    REQUIRE(step < good.size());
    std::vector<std::pair<size_t, int>> bits = {{step, 0}, {step, 1}};
    for (int i = 0; i < 60; ++i)
        bits.emplace_back(random_bits(1, 2 * i) % (i % 4 > 0 ? head : good.size()), int(random_bits(1, 2 * i + 1) % 8));
    int count = 0;
    for (const auto& [byte, bit] : bits) {
        std::string manifest = good;
        manifest[byte] = char(manifest[byte] ^ (1 << bit));
        INFO("byte " << byte << ", bit " << bit << ": " << good.substr(byte - std::min<size_t>(byte, 20), 40));
        count += int(refused(manifest));
    }
    INFO(count << " flipped bits are refused");
    EXPECT(count > 20);

    const Json known = Json::parse(good), leaves = known.flatten();
    std::vector<std::string> places = {"/layout", "/model",   "/data",           "/flags",
                                       "/files",  "/files/0", "/files/0/tensors"};
    for (const auto& [place, value] : leaves.items())
        if (!place.starts_with("/flags/") && (!place.starts_with("/files/0/tensors/") || place.ends_with("/0")))
            places.push_back(place);
    const auto kind = [](const Json& value) {
        return std::string(value.is_number_integer() ? "integer" : value.type_name());
    };
    int64_t number = 0;
    for (const std::string& place : places)
        for (const char* text : {"null", "true", "-1", "4.5", "1000000000000", "\"x\"", "[]", "{}"}) {
            const int64_t turn = number + number / 8;  // another value at each place
            ++number;
            if (!in_slice(turn)) continue;
            INFO(place << ": " << std::string(text));
            Json manifest = known;
            Json& value = manifest[Json::json_pointer(place)];
            const std::string before = kind(value);
            value = Json::parse(text);
            EXPECT((refused(manifest.dump(1)) || place.starts_with("/model") || kind(value) == before));
        }
}

TEST_CASE("08: paths that are not UTF-8, from the data to the checkpoint that is resumed") {
    const Workplace place;
    const std::string text = Workplace::file("d\xe9.txt"), run = "--data " + text + " --metrics ";
    write_text(text, read_text(repository_file("README.md")));
    const auto call = [&](const std::string& flags) { Workplace::call(kProgram, completed(run + flags, kShape)); };
    call("whole.jsonl");
    call("m.jsonl --checkpoint-dir c\xe9k --checkpoint-every 2 --stop-after 4 --save-reference r\xe9");
    for (const char* path : {"c\xe9k/step-2/manifest.json", "c\xe9k/step-4/manifest.json", "r\xe9/reference.json"})
        EXPECT(fs::exists(path));
    call("m.jsonl --checkpoint-dir c\xe9k --resume");
    EXPECT(losses("m.jsonl") == losses("whole.jsonl"));
}

TEST_CASE("08: a link where a rank tries whether it can write: what it points to stays as it is") {
    const Checkpoints ck;
    ck.renew();
    write_text("precious", "data");
    fs::create_symlink("../precious", "ck/.rank-0.probe");
    Workplace::call(kProgram, completed(kResume + " --stop-after 5", kShape));
    EXPECT(read_text("precious") == "data");
}
