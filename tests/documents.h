#pragma once
// Packed documents: a text of them, and what they must be equal to, the documents computed one by one.
#include "01_single_gpu/complete/data/data.h"
#include "tests/training.h"

namespace train70b::test {

constexpr int32_t kEnd = '$';  // ends a document of DocumentText

// A text file of documents of random lengths, from the end alone, several in a row, to longer than a test's sequences.
struct DocumentText {
    Folder folder;
    std::string path = folder / "documents.txt";

    DocumentText() {
        std::ofstream file(path);
        for (int64_t i = 0; i < 600; ++i) {
            const int64_t lengths[] = {1, 1, 2, 3, 5, 8, 13, 21, 34, 60};
            for (int64_t left = lengths[random_bits(7, i) % 10]; left > 1; --left)
                file << char('a' + random_bits(8, i * 100 + left) % 20);
            file << char(kEnd);
        }
    }
};

// The definition: the token behind the last end before t.
inline int32_t start_of(const std::vector<int32_t>& sample, int64_t t, int64_t document_token) {
    for (int64_t i = t; i > 0; --i)
        if (sample[size_t(i - 1)] == document_token) return int32_t(i);
    return 0;
}

// Loss and gradients of step 1, each document as a sequence of its own in a batch of its own; gradients in the order of
// all_params(). counted: the documents.
struct Alone {
    double loss = 0;
    std::vector<std::vector<double>> gradients;
    int64_t counted = 0;

    explicit Alone(TrainOptions o) {
        const int64_t end = *o.document_token;
        o.document_token.reset();
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        Llama model(o.model, o.llama());
        model.materialize(o.seed);
        for (const auto& [sample, targets] : Batches(o, data).global_batch(1))
            for (int64_t begin = 0, next; begin < o.seq_len; begin = next) {
                for (next = begin + 1; next < o.seq_len && start_of(sample, next, end) == begin;) ++next;
                const auto part = [&, &tokens = sample](int64_t from) {
                    return upload({tokens.begin() + from, tokens.begin() + from + next - begin}, {next - begin},
                                  Device::cpu);
                };
                std::vector<int32_t> positions(size_t(next - begin));
                for (size_t i = 0; i < positions.size(); ++i) positions[i] = int32_t(i);
                Batch batch{1, next - begin, part(begin), part(begin + 1)};
                batch.positions = upload(positions, {next - begin}, Device::cpu);
                batch.loss_scale = 1.0 / double(o.global_batch * o.seq_len);
                Tape tape;
                loss += read(model.forward(tape, batch).data)[0];
                tape.backward();
                ++counted;
            }
        for (const Param& wanted : all_params(o.model))
            for (const Param* param : model.params())
                if (param->name == wanted.name) gradients.push_back(values(param->grad));
    }

    // The farthest that a run's first step is from this. Where all documents are one token long, the gradients of q and
    // k are nothing but rounding: they are measured against a millionth of the whole.
    Farthest deviation(const Session& run) const {
        Farthest worst;
        worst.add(std::abs(run.reports.at(0).loss / loss - 1), "loss");
        REQUIRE(run.gradients.size() == gradients.size());
        double whole = 0;
        for (const std::vector<double>& gradient : gradients) whole += dot(gradient, gradient);
        for (size_t i = 0; i < gradients.size(); ++i) {
            const std::vector<double> difference = minus(run.gradients[i], gradients[i]);
            const double size = std::max(dot(gradients[i], gradients[i]), 1e-12 * whole);
            worst.add(std::sqrt(dot(difference, difference) / size), "gradient of " + run.names[i]);
        }
        return worst;
    }
};

}  // namespace train70b::test
