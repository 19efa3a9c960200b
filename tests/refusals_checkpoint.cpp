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
    // flags replace the shape's.
    void refused(const std::string& name, const std::string& parts, const std::function<void()>& change = {},
                 const std::string& flags = kResume) const {
        renew();
        if (change) change();
        place.refused(name, kProgram, parts, completed(flags, kShape));
    }

    const Workplace place;
};

void replace(const std::string& path, const std::string& what, const std::string& by) {
    std::string text = read_text(path);
    DOCTEST_REQUIRE_MESSAGE(text.find(what) != text.npos, what);
    write_text(path, text.replace(text.find(what), what.size(), by));
}

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

void edit(const std::function<void(nlohmann::ordered_json&)>& change) {
    nlohmann::ordered_json manifest = nlohmann::ordered_json::parse(read_text(kManifest));
    change(manifest);
    write_text(kManifest, manifest.dump(1));
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
    const auto header = nlohmann::ordered_json::parse(file.substr(sizeof size, size));
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") continue;
        const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
        tensors[name] = {entry["dtype"], entry["shape"], file.substr(sizeof size + size + begin, end - begin)};
    }
    change(tensors);
    nlohmann::ordered_json changed, names = nlohmann::ordered_json::array();
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
    edit([&](nlohmann::ordered_json& m) {
        m["files"][0]["bytes"] = whole.size();
        m["files"][0]["crc32"] = crc32(0, reinterpret_cast<const Bytef*>(whole.data()), uInt(whole.size()));
        m["files"][0]["tensors"] = names;
    });
}

}  // namespace

TEST_CASE("08: a checkpoint that is damaged") {
    const Checkpoints ck;
    ck.refused("a truncated file", kTensors + ": has |truncated|" + kOlder,
               [] { fs::resize_file(kTensors, fs::file_size(kTensors) - 100); });
    ck.refused("a missing file", kTensors + ": missing|" + kOlder, [] { fs::remove(kTensors); });
    ck.refused("a folder in place of a file", "rank-00000.safetensors: missing, or not a regular file", [] {
        fs::remove(kTensors);
        fs::create_directory(kTensors);
    });
    ck.refused("a link to a device", "rank-00000.safetensors: missing, or not a regular file", [] {
        fs::remove(kTensors);
        fs::create_symlink("/dev/zero", kTensors);
    });
    ck.refused("a FIFO in place of the manifest", kManifest + ": ", [] {
        fs::remove(kManifest);
        REQUIRE(::mkfifo(kManifest.c_str(), 0600) == 0);
    });
    const auto named = [&](const std::string& name, const std::string& part) {
        ck.refused(fmt::format("a file named '{}'", name), kManifest + ": |" + part,
                   [&] { replace(kManifest, "\"rank-00000.safetensors\"", fmt::format("\"{}\"", name)); });
    };
    for (const char* name : {"../step-2/rank-00000.safetensors", "/etc/passwd", "sub/rank-00000.safetensors", ".", "..",
                             "", "x\\u0000y", ".lock"})
        named(name, kOlder);
    named("new\\nline", "new\\x0aline|" + kOlder);
    for (const auto& [text, part] :
         std::map<std::string, std::string>{{"step 4", kOlder}, {"", kOlder}, {"[]", "not a JSON object"}})
        ck.refused(fmt::format("a manifest '{}'", text), kManifest + ": |" + part,
                   [&] { write_text(kManifest, text); });
    ck.refused("lists in lists", kManifest + ": ", [] { write_text(kManifest, nested_lists(100'000)); });
    ck.refused("half a manifest", kManifest + ": ", [] { fs::resize_file(kManifest, fs::file_size(kManifest) / 2); });

    const std::string values =
        R"(step=0 step=-4 step=4.5 step=5 step=99999999999999999999999 step=1e400 step=null step="4" version=-1 )"
        R"(ranks=0 next_sample=31 dtype="bf16" dtype="fp8" optimizer="adamw8bit" bytes=-1 )"
        R"(bytes=9223372036854775808 crc32=4294967296 crc32=-1 num_hidden_layers=9999999999 hidden_size=0 )"
        R"(num_attention_heads=7 rms_norm_eps=NaN rope_theta=2.0 rope_scaling={"rope_type":"llama3","factor":8.0,)"
        R"("low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64} )"
        R"(flags={} data={} files={} model=null tensors=[1])";
    for (const std::string& pair : split_at(values, ' '))
        ck.refused(pair + " in the manifest", "ck/step-4",
                   [&] { set_value(pair.substr(0, pair.find('=')), pair.substr(pair.find('=') + 1)); });
}

TEST_CASE("08: a manifest that is not of its files") {
    const Checkpoints ck;
    using Json = nlohmann::ordered_json;
    const auto tensors = [&](const std::string& name, const std::string& parts,
                             const std::function<void(Json&)>& change) {
        ck.refused(name, parts, [&] { edit([&](Json& m) { change(m["files"][0]["tensors"]); }); });
    };
    const auto first = [&](const std::string& name, const std::string& parts, const std::string& what,
                           const std::string& by) {
        tensors(name, parts, [&](Json& list) {
            std::string text = list[0];
            DOCTEST_REQUIRE_MESSAGE(text.find(what) != text.npos, text);
            list[0] = text.replace(text.find(what), what.size(), by);
        });
    };
    tensors("overlapping rectangles", "overlap|" + kOlder, [](Json& list) { list.push_back(Json(list[0])); });
    tensors("a missing rectangle", "elements are in no file|" + kOlder, [](Json& list) { list.erase(0); });
    first("an unknown state", "velocity/", "weight/", "velocity/");
    first("an unknown parameter", "is not a parameter of the model", "embed_tokens", "tokens");
    for (const auto& [name, rectangle, part] : std::vector<std::array<std::string, 3>>{
             {"a rectangle outside the parameter", "0:999", "but the parameter is"},
             {"a rectangle that is none", "5:2", "is not part of a full checkpoint"},
             {"a rectangle of huge numbers", "0:999999999999999999", kManifest + ": "}})
        tensors(name, part, [&](Json& list) { list[0] = fmt::format("weight/model.norm.weight[{}]", rectangle); });
    for (const auto& [name, part, change] : std::vector<std::tuple<std::string, std::string, void (*)(Json&)>>{
             {"a file listed twice", "overlap", [](Json& m) { m["files"].push_back(Json(m["files"][0])); }},
             {"no files", "elements are in no file", [](Json& m) { m["files"] = Json::array(); }},
             {"a newer version", "format version 2, but this program reads version 1",
              [](Json& m) { m["version"] = 2; }},
             {"another format", "its format is", [](Json& m) { m["format"] = "x"; }},
             {"an unknown kind", "\"kind\" is \"some\"", [](Json& m) { m["kind"] = "some"; }},
             {"weights with moments", "is not part of a weights checkpoint", [](Json& m) { m["kind"] = "weights"; }},
             {"more ranks than files", "\"ranks\" is 1000000000000, but \"files\" lists 1",
              [](Json& m) { m["ranks"] = 1000000000000; }},
             {"kernels of no name", "\"blas_core\" must be a string", [](Json& m) { m["blas_core"] = 5; }}})
        ck.refused(name, part, [&] { edit(change); });
    for (const char* flag : {"batch-ramp", "seq-ramp", "document-token", "mup"})
        for (const Json& value : {Json(8), Json::array({"8"})})
            ck.refused("a flag of another type", kManifest + ": \"" + flag + "\" must be a string",
                       [&] { edit([&](Json& m) { m["flags"][flag] = value; }); });
    ck.refused("a folder of another name", "ck/step-9/manifest.json: \"step\" is 4, but the folder is step-9 (rename",
               [] { fs::rename("ck/step-4", "ck/step-9"); });
    ck.refused("two folders that have each other's names", kManifest + ": \"step\" is 2, but the folder is step-4", [] {
        fs::rename("ck/step-4", "ck/step-3");
        fs::rename("ck/step-2", "ck/step-4");
        fs::rename("ck/step-3", "ck/step-2");
    });

    // What agrees with its checksum, but not with what it says.
    using Tensors = std::map<std::string, Stored>;
    const auto stored = [&](const std::string& name, const std::string& part,
                            const std::function<void(Tensors&)>& change) {
        ck.refused(name, "rank-00000.safetensors: tensor|" + part, [&] { edit_tensors(change); });
    };
    stored("fp64 values", "must be fp32", [](Tensors& all) {
        for (auto& [name, x] : all) x.dtype = "F64", x.bytes += x.bytes;
    });
    stored("a tensor of another shape than its rectangle", "", [](Tensors& all) {
        all.begin()->second.shape = {1};
        all.begin()->second.bytes.resize(4);
    });
    stored("codes in a run of adamw", "must be fp32", [](Tensors& all) {
        for (auto& [name, x] : all)
            if (name.starts_with("exp")) x.dtype = "U8", x.bytes.resize(x.bytes.size() / 4);
    });
    stored("scales without codes", "", [](Tensors& all) {
        all["scale/model.norm.weight[0:32]"] = {"F32", {2, 1}, std::string(8, '\0')};
    });
}

TEST_CASE("08: a checkpoint of another run") {
    const Checkpoints ck;
    const auto changed = [&](const std::string& flags, const std::string& part) {
        ck.refused("another " + flags, part, {}, flags + " " + kResume);
    };
    for (const std::string flags :
         {"--layers 4", "--hidden 64", "--heads 2", "--kv-heads 4", "--ffn 64", "--vocab 260"})
        changed(flags, "a checkpoint of another model: its " + split_at(flags, ' ')[0] + " is");
    changed("--tied-embeddings on",
            "a checkpoint of another model: its --tied-embeddings is off, but this run's is on (try --tied-embeddings "
            "off)");
    for (const std::string flags :
         {"--dtype bf16", "--dtype fp64 --grad-dtype fp64", "--optimizer adamw8bit", "--seed 2", "--seq-len 16",
          "--global-batch 4", "--val-fraction 0.2", "--fp8 current", "--document-token 10"})
        changed(flags, split_at(flags, ' ')[0] + " ");
    std::string text = "Another text, which is long enough for some samples:";
    for (int i = 1; i < 1000; ++i) text += fmt::format(" {}", i);
    write_text(Workplace::file("text.txt"), text);
    changed("--data ../files/text.txt", "--data ../files/text.txt: is not the data of the checkpoint ck/step-4");
}

TEST_CASE("08: flags of checkpoints") {
    const Checkpoints ck;
    write_text(Workplace::file("text.txt"), "a text");
    const auto refused = [&](const std::string& name, const std::string& part, const std::string& flags,
                             const std::function<void()>& change = {}) { ck.refused(name, part, change, flags); };
    const std::string here = "--checkpoint-dir ck ";
    refused("the folder of checkpoints", "ck: is not a checkpoint: it has no manifest.json (must be DIR/step-N)",
            "--resume-from ck");
    refused("a checkpoint that is being written", "is not a checkpoint", "--resume-from ck/step-9.tmp",
            [] { fs::create_directory("ck/step-9.tmp"); });
    refused("a folder that is none", "nothing: is not a folder", "--resume-from nothing");
    refused("a file", "text.txt: is not a folder", "--resume-from ../files/text.txt");
    refused("weights only", "ck/weights-4: holds the weights only; a run goes on from a full checkpoint",
            "--resume-from ck/weights-4");
    refused("--resume in an empty folder", "--resume: ck has no complete checkpoint", kResume, [] {
        fs::remove_all("ck");
        fs::create_directory("ck");
    });
    refused("--resume where there is no folder", "--resume: ck has no complete checkpoint", kResume,
            [] { fs::remove_all("ck"); });
    refused("--resume with what a crash has left", "--resume: ck has no complete checkpoint", kResume, [] {
        for (const char* name : {"ck/step-2", "ck/weights-2", "ck/weights-4"}) fs::remove_all(name);
        fs::rename("ck/step-4", "ck/step-4.tmp");
    });
    refused("an older checkpoint beside newer ones",
            "--checkpoint-dir ck: has checkpoints up to step-4, which a run from ck/step-2 would overwrite",
            here + "--resume-from ck/step-2");
    refused("two ways to resume",
            "--resume: goes on from the newest checkpoint, --resume-from from ck/step-2 (use one of the two)",
            here + "--resume --resume-from ck/step-2");
    refused("no step left", "ck/step-8: is of step 8, and --steps is 8 (try --steps 16)", kResume, [] {
        fs::rename("ck/step-4", "ck/step-8");
        replace("ck/step-8/manifest.json", "\"step\": 4", "\"step\": 8");
        replace("ck/step-8/manifest.json", "\"next_sample\": 32", "\"next_sample\": 64");
    });
    for (const std::string flag : {"--checkpoint-every 2", "--weights-every 2", "--keep 2", "--resume"})
        refused(flag + " without a folder", split_at(flag, ' ')[0] + ": needs --checkpoint-dir DIR", flag);
    refused("--keep 0", "--keep", here + "--keep 0");
    refused("a stop after the end", "--stop-after 9: must be at most --steps 8", here + "--resume --stop-after 9");
    refused("an empty name", "--checkpoint-dir|empty path", "--checkpoint-dir ''");
    refused("a simulated group", "--checkpoint-dir ck: with --comm fake", here + "--comm fake --fake-world 4");
    refused("a reference run that begins later", "--save-reference r: a reference run begins at step 1",
            here + "--resume --save-reference r");
    refused("a file in place of the folder", "--checkpoint-dir ../files/text.txt",
            "--checkpoint-dir ../files/text.txt");
    refused("a folder that cannot be made", "--checkpoint-dir /proc/checkpoints", "--checkpoint-dir /proc/checkpoints");
}

TEST_CASE("08: a flipped bit in the manifest: refused, or the same losses") {
    const Checkpoints ck;
    const std::string good = read_text("../files/base/step-4/manifest.json");
    const size_t head = good.find("\"files\""), step = good.find("\"step\": 4") + 8;
    REQUIRE(step < good.size());
    std::vector<std::pair<size_t, int>> places = {{step, 0}, {step, 1}};
    for (int i = 0; i < 60; ++i)
        places.emplace_back(random_bits(1, 2 * i) % (i % 4 > 0 ? head : good.size()),
                            int(random_bits(1, 2 * i + 1) % 8));
    const std::vector<double> expected = ck.resumed(good);
    REQUIRE(expected.size() == 2);
    int refused = 0;
    for (const auto& [at, bit] : places) {
        std::string manifest = good;
        manifest[at] = char(manifest[at] ^ (1 << bit));
        INFO("byte " << at << ", bit " << bit << ": " << good.substr(at - std::min<size_t>(at, 20), 40));
        try {
            const std::vector<double> found = ck.resumed(manifest);
            EXPECT(found == expected);
        } catch (const UsageError&) {
            EXPECT(!fs::exists("m.jsonl"));
            ++refused;
        }
    }
    INFO(refused << " are refused");
    EXPECT(refused > 20);
}

TEST_CASE("08: a value of another kind in the manifest: refused, or the same losses") {
    using Json = nlohmann::ordered_json;
    const Checkpoints ck;
    const Json good = Json::parse(read_text("../files/base/step-4/manifest.json"));
    const std::vector<double> expected = ck.resumed(good.dump(1));
    std::vector<std::string> places = {"/layout", "/model",   "/data",           "/flags",
                                       "/files",  "/files/0", "/files/0/tensors"};
    const Json leaves = good.flatten();
    for (const auto& [place, value] : leaves.items())
        if (!place.starts_with("/flags/") && (!place.starts_with("/files/0/tensors/") || place.ends_with("/0")))
            places.push_back(place);
    const auto kind = [](const Json& manifest, const std::string& place) {
        const Json& value = manifest[Json::json_pointer(place)];
        return std::string(value.is_number_integer() ? "integer" : value.type_name());
    };
    int64_t number = 0;
    for (const std::string& place : places)
        for (const char* value : {"null", "true", "-1", "4.5", "1000000000000", "\"x\"", "[]", "{}"}) {
            const int64_t turn = number + number / 8;  // another value at each place
            ++number;
            if (!in_slice(turn)) continue;
            INFO(place << ": " << std::string(value));
            Json manifest = good;
            manifest[Json::json_pointer(place)] = Json::parse(value);
            try {
                const std::vector<double> found = ck.resumed(manifest.dump(1));
                EXPECT(found == expected);
                EXPECT((place.starts_with("/model") || kind(manifest, place) == kind(good, place)));
            } catch (const UsageError&) { EXPECT(!fs::exists("m.jsonl")); } catch (const std::exception& error) {
                DOCTEST_FAIL_CHECK(std::string(error.what()));
            }
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
