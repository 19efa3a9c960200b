// What an op costs on a device, and the files that say so: clusters, and what --bench has measured.
#include "tests/costs.h"

using namespace train70b;
using namespace train70b::test;

// ---- ops ------------------------------------------------------------------------------------------------------------

TEST_CASE("what a device sustains: products and attention are slower by it, copies are not") {
    DeviceModel h100 = device("H100"), busy = h100;
    busy.sustained = 0.8;
    busy.sustained_fp8 = 0.9;
    h100.launch_s = busy.launch_s = 0;
    const auto slower = [&](const OpCall& op) { return op_seconds(busy, op) / op_seconds(h100, op); };
    EXPECT(slower(product(8192, 8192, 8192)) == Approx(1 / 0.8));
    EXPECT(slower(product(8192, 8192, 8192, DType::e4m3)) == Approx(1 / 0.9));
    OpCall attention{.name = "attention", .shape = {1, 8192, 8192, 32, 8, 128, 1}, .dtype = DType::bf16, .flops = 1e13};
    EXPECT(slower(attention) == Approx(1 / 0.8));
    EXPECT(slower({.name = "add", .dtype = DType::bf16, .bytes = 1e9}) == Approx(1));
}

TEST_CASE("large products reach what was measured; small and odd ones less") {
    const DeviceModel& h200 = device("H200");
    EXPECT(rate(h200, product(8192, 8192, 8192)) == Approx(795e12).epsilon(0.03));
    EXPECT(rate(h200, product(16384, 8192, 28672)) == Approx(795e12).epsilon(0.05));
    EXPECT(rate(h200, product(8192, 8192, 8192, DType::e4m3)) == Approx(1450e12).epsilon(0.03));
    double before = 0;
    for (int64_t side = 64; side <= 8192; side *= 2) {
        const double now = rate(h200, product(side, side, side));
        INFO(side, ": ", now / 1e12);
        EXPECT(now > before);
        before = now;
    }
    // cuBLAS on a B200: 1006, 1532 and 1610 TFLOP/s.
    const DeviceModel& b200 = device("B200");
    const double large = rate(b200, product(8192, 8192, 8192));
    EXPECT(rate(b200, product(4096, 4096, 4096)) / large == Approx(1532.0 / 1610).epsilon(0.1));
    EXPECT(rate(b200, product(2048, 2048, 2048)) / large == Approx(1006.0 / 1610).epsilon(0.15));
    // 66 x 32 tiles are 16 waves on 132 multiprocessors; one row more is another wave.
    EXPECT(op_seconds(h200, product(8449, 8192, 8192)) > 1.05 * op_seconds(h200, product(8448, 8192, 8192)));
    EXPECT(rate(h200, product(8192, 8192, 64)) < 0.7 * rate(h200, product(8192, 8192, 8192)));
    // A row of a matrix is read in the time of a copy.
    const OpCall row = product(1, 8192, 8192);
    EXPECT(op_seconds(h200, row) == Approx(row.bytes / h200.copy_bytes_per_s + h200.launch_s));
    EXPECT(op_seconds(h200, product(16, 16, 16)) >= h200.launch_s);
    EXPECT_USAGE_ERROR(op_seconds(device("A100"), product(64, 64, 64, DType::e4m3)), "A100 has no FP8");
    EXPECT(rate(h200, product(8192, 8192, 8192, DType::f32)) < 67e12);
    EXPECT(rate(h200, product(8192, 8192, 8192, DType::f64)) ==
           Approx(rate(h200, product(8192, 8192, 8192, DType::f32)) / 2).epsilon(0.01));
}

TEST_CASE("attention by length: cuDNN's figures on an H200") {
    const DeviceModel& h200 = device("H200");
    for (const auto& [tokens, forward, backward] :
         {std::tuple{4096, 591e12, 474e12}, {8192, 644e12, 541e12}, {32768, 688e12, 581e12}}) {
        EXPECT(rate(h200, attention(false, 1, tokens, 64, 8, 128, true)) == Approx(forward).epsilon(0.05));
        EXPECT(rate(h200, attention(true, 1, tokens, 64, 8, 128, true)) == Approx(backward).epsilon(0.05));
    }
    const auto at = [&](int64_t tokens, int64_t heads, int64_t head_dim, bool causal) {
        return rate(h200, attention(false, 1, tokens, heads, heads, head_dim, causal));
    };
    EXPECT(at(1024, 64, 128, true) < at(4096, 64, 128, true));
    EXPECT(at(6000, 64, 128, true) > at(4096, 64, 128, true));
    EXPECT(at(6000, 64, 128, true) < at(8192, 64, 128, true));
    EXPECT(at(4096, 64, 128, false) > at(4096, 64, 128, true));
    EXPECT(at(4096, 64, 64, true) < at(4096, 64, 128, true));
    // Heads of 64: 0.69 and 0.84 of the rate of heads of 128.
    const auto large = [&](bool backward, int64_t head_dim) {
        return rate(h200, attention(backward, 1, 32768, 64, 8, head_dim, true));
    };
    EXPECT(large(false, 64) / large(false, 128) == Approx(0.69).epsilon(0.01));
    EXPECT(large(true, 64) / large(true, 128) == Approx(0.84).epsilon(0.01));
    // A multiprocessor works on 128 rows of a head, even if there are fewer.
    OpCall full = attention(false, 1, 128, 8, 8, 128, true), fewer = full;
    fewer.shape[1] = 100;
    EXPECT(op_seconds(h200, fewer) == op_seconds(h200, full));
    // In fp32 at that of its products, and never faster than its bytes are copied.
    OpCall wide = attention(false, 1, 8192, 64, 64, 128, true);
    wide.dtype = DType::f32;
    EXPECT(rate(h200, wide) < 67e12);
    OpCall one_token = attention(false, 1, 1, 64, 64, 128, true);
    one_token.bytes = 4.3e9;
    EXPECT(op_seconds(h200, one_token) == Approx(1e-3 + h200.launch_s));
    EXPECT(at(1024, 8, 128, true) < 0.6 * at(1024, 64, 128, true));  // 64 groups of rows for 132 multiprocessors
}

TEST_CASE("other ops move bytes; measured ops cost what --bench measured") {
    DeviceModel h100 = device("H100");
    const OpCall norm{.name = "rmsnorm", .dtype = DType::bf16, .bytes = 3e9};
    EXPECT(op_seconds(h100, norm) == Approx(1e-3 + h100.launch_s));
    parse_device_csv(
        "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n"
        "matmul,15,36.9,0.5,0.77,500000,119.8\n"
        "rmsnorm,2,0.02,0.001,0.0004,0,1500\n"
        "between the ops,,0.28,,0.0059,,\n"
        "whole_step,1,40.2,,1,1.37,\n",
        "--device-csv t.csv", h100);
    EXPECT(h100.measured.size() == 2);
    EXPECT(op_seconds(h100, norm) == Approx(2e-3));
    EXPECT(rate(h100, product(64, 8192, 8192)) == Approx(500e12));
    EXPECT(op_seconds(h100, product(1, 1, 1)) == h100.launch_s);
    EXPECT(op_seconds(h100, {.name = "swiglu", .bytes = 3e9}) == Approx(1e-3 + h100.launch_s));  // not measured
}

TEST_CASE("a program that does not fuse an op: a multiple of its bytes and launches") {
    const ClusterModel cluster = parse_cluster(
        R"({"name": "x", "nodes": 1, "gpus_per_node": 1,
            "device": {"name": "H100", "pointwise_traffic": {"rmsnorm": [9, 8]}}})",
        "--simulate F");
    const double launch_s = cluster.device.launch_s;
    EXPECT(op_seconds(cluster.device, {.name = "rmsnorm", .bytes = 3e9}) == Approx(9e-3 + 8 * launch_s));
    EXPECT(op_seconds(cluster.device, {.name = "swiglu", .bytes = 3e9}) == Approx(1e-3 + launch_s));
    EXPECT(op_seconds(cluster.device, product(64, 64, 64)) == op_seconds(named_devices()[1], product(64, 64, 64)));
}

// ---- files ----------------------------------------------------------------------------------------------------------

TEST_CASE("the clusters of the repository") {
    for (const auto& [file, devices] : std::map<std::string, int64_t>{{"h100-8.json", 8},
                                                                      {"h100-8x8.json", 64},
                                                                      {"h100-32x8.json", 256},
                                                                      {"h100-64x8.json", 512},
                                                                      {"h100-16384.json", 16384},
                                                                      {"h200-8.json", 8},
                                                                      {"b200-8x8.json", 64},
                                                                      {"a100-8.json", 8},
                                                                      {"cpu.json", 64},
                                                                      {"box.json", 6}}) {
        INFO(file);
        const ClusterModel cluster = cluster_of(file);
        EXPECT(cluster.devices() == devices);
        const double seconds = cost(cluster, comm_call("all_reduce", 1 << 20), every(devices)).seconds;
        EXPECT(seconds > 0);
        EXPECT(seconds < 1);
    }
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("08_3d_full/plan/clusters"))
        files += entry.path().extension() == ".json";
    EXPECT(files == 10);
    EXPECT(cluster_of("cpu.json").device.streams == false);
    EXPECT(cluster_of("cpu.json").cores == 2);
    EXPECT(resized(cluster_of("h100-8x8.json"), 1024, "--gpus 1024").nodes == 128);
    EXPECT(resized(cluster_of("h100-8x8.json"), 2, "--gpus 2").nodes == 1);
    EXPECT_USAGE_ERROR(resized(cluster_of("cpu.json"), 65, "--gpus 65"), "--gpus 65: ranks on 2 cores has 64 devices");
    EXPECT_USAGE_ERROR(resized(cluster_of("h100-8.json"), 0, "--gpus 0"), "--gpus 0");
}

TEST_CASE("a named device with other figures") {
    const ClusterModel cluster = parse_cluster(
        R"({"name": "x", "device": {"name": "H100", "memory_bytes": 9.4e10, "flops_per_s": 1e14}, "nodes": 1,
            "gpus_per_node": 1})",
        "--simulate x.json");
    EXPECT(cluster.device.memory_bytes == 94e9);
    EXPECT(cluster.device.flops_per_s == 1e14);
    EXPECT(cluster.device.peak_bf16 == device("H100").peak_bf16);
    EXPECT(cluster_of("h100-8.json").device.flops_per_s == Approx(794e12).epsilon(0.001));
}

TEST_CASE("a file that is no cluster: one line with the file, the key and the rule") {
    const std::string good =
        R"("name": "x", "device": "H100", "nodes": 2, "gpus_per_node": 8, "host": {"bytes_per_s": 1e9, "seconds": 0})";
    const std::string link = R"({"bytes_per_s": 1e10, "seconds": 1e-6})", rail = R"(, "rail": )" + link;
    EXPECT(parse_cluster("{" + good + rail + "}", "--simulate F").nodes == 2);
    for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
             {"{" + good + "}", "--simulate F: rail is missing: 2 nodes"},
             {"[]", "--simulate F: is not a JSON object"},
             {"{", "--simulate F: truncated or corrupt"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 0, "seconds": 1}})",
              "--simulate F: rail: bytes_per_s 0: must be a number from 1000000 to 1e+30"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 45, "seconds": 0}})",
              "rail: bytes_per_s 45: must be a number from 1000000"},
             {"{" + good + R"(, "rail": {"bytes_per_s": -1, "seconds": 1}})",
              "rail: bytes_per_s -1: must be a number from 1000000"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e-300, "seconds": 1}})",
              "rail: bytes_per_s 1e-300: must be a number from 1000000"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e300, "seconds": 1}})",
              "rail: bytes_per_s 1e+300: must be a number from 1000000 to 1e+30"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e9}})", "rail: seconds is missing"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e9, "seconds": -1}})",
              "rail: seconds -1: must be a number from 0 to 1"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e9, "seconds": 0, "gbps": 1}})",
              "rail: gbps 1: is not a key with a value (bytes_per_s, name, seconds)"},
             {"{" + good + rail + R"(, "gpus": 8})",
              "gpus 8: is not a key with a value (cores, device, gpus_per_node, host, name, nodes"},
             {"{" + good + rail + R"(, "rails": 0})", "rails 0: must be an integer from 1"},
             {"{" + good + rail + R"(, "rails": 1.5})", "rails 1.5: must be an integer from 1"},
             {"{" + good + rail + R"(, "oversubscription": 0.5})", "oversubscription 0.5: must be a number from 1"},
             {"{" + good + rail + R"(, "nvls": true})", "nvls true: needs nvlink"},
             {"{" + good + rail + R"(, "nvls": 1})", "nvls 1: must be true or false"},
             {"{" + good + rail + R"(, "one_machine": true})", "one_machine true: needs cores"},
             {"{" + good + R"(, "rail": null})", "rail null: is not a key with a value"},
             {"{" + good + rail + R"(, "cores": null})", "cores null: is not a key with a value"},
             {"{" + good + rail + R"(, "nodes": 1})", "lists \"nodes\" twice"},
             {R"({"name": "x"})", "device is missing"},
             {R"({"name": "x", "device": "H1000"})", "device H1000: unknown; must be one of A100 H100 H200 B200"},
             {R"({"name": "x", "device": {"name": "mine"}})", "device: peak_bf16 is missing"},
             {R"({"name": "x", "device": {"name": "H100", "peak_bf16": 0}})",
              "device: peak_bf16 0: must be a number from 1e-09"},
             {R"({"name": "x", "device": {"name": "H100", "product_efficiency": 2}})",
              "device: product_efficiency 2: must be a number from 1e-09 to 1"},
             {R"({"name": "x", "device": {"name": "H100", "attention": [[2, 1, 1], [1, 1, 1]]}})",
              "device: attention [[2,1,1],[1,1,1]]: must be a list of [tokens, forward, backward]"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": [1]}})",
              "device: pointwise_traffic [1]: must be an object"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"add": 2}}})",
              "device: pointwise_traffic: add 2: must be [bytes, kernels]"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"add": [0, 1]}}})",
              "device: pointwise_traffic: add [0,1]: must be [bytes, kernels]"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"add": [1, 0]}}})",
              "device: pointwise_traffic: add [1,0]: must be [bytes, kernels]"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"matmul": [2, 1]}}})",
              "device: pointwise_traffic: matmul [2,1]: is not for products"},
             {R"({"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 2})",
              "nvlink is missing, and host: 2 devices in a node"},
             {R"({"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 1, "rails": 2})", "rails 2: needs rail"},
             {R"({"name": "x", "device": "H100", "nodes": 1000000, "gpus_per_node": 8, "rail": )" + link + "}",
              "nodes 1000000: of 8 devices: more than 1000000"},
         }) {
        INFO(text);
        EXPECT_USAGE_ERROR(parse_cluster(text, "--simulate F"), part.c_str());
    }
    EXPECT_USAGE_ERROR(read_cluster("nowhere.json", "--simulate"), "--simulate nowhere.json: cannot be read");
}

TEST_CASE("a file that --bench did not write: one line with the file, the line and the rule") {
    const std::string header = "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n";
    for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
             {"", "--device-csv F: line 1: must be op,calls"},
             {"op,calls\n", "line 1: must be op,calls"},
             {header, "--device-csv F: has no op"},
             {header + "whole_step,1,40.2,,1,1.37,\n", "has no op"},
             {header + "matmul,1,1\n", "line 2: has 3 cells, not 7"},
             {header + "matmul,1,1,1,1,1,1\n\nadd,1,1,1,1,0,1\n", "line 3: has 1 cells, not 7"},
             {header + ",1,1,1,1,1,1\n", "line 2: has no op"},
             {header + "matmul,1,1,1,1,fast,1\n", "line 2: gflops fast must be a number >= 0"},
             {header + "matmul,1,1,1,1,1 ,1\n", "line 2: gflops"},
             {header + "matmul,1,1,1,1,nan,1\n", "line 2: gflops"},
             {header + "matmul,1,1,1,1,inf,1\n", "line 2: gflops"},
             {header + "add,1,1,1,1,0,-1\n", "line 2: gbytes_per_s -1 must be a number >= 0"},
             {header + "add,1,1,1,1,0,0\n", "line 2: add has neither gflops nor gbytes_per_s above 0"},
             {header + "add,1,1,1,1,,\n", "line 2: add has neither"},
             {header + "add,1,1,1,1,0,1\nadd,1,1,1,1,0,1\n", "line 3: add is there twice"},
         }) {
        INFO(text);
        DeviceModel h100 = device("H100");
        EXPECT_USAGE_ERROR(parse_device_csv(text, "--device-csv F", h100), part.c_str());
        EXPECT(h100.measured.empty());
    }
    DeviceModel h100 = device("H100");
    EXPECT_USAGE_ERROR(read_device_csv("nowhere.csv", "--device-csv", h100),
                       "--device-csv nowhere.csv: cannot be read");
}
