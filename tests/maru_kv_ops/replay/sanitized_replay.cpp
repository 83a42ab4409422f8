// The replay as a program of its own, for sanitizers: every format, operation, way and unit, over
// buffers that end where their last byte does.
//
// Each case stores from a cache into objects, loads these into an empty cache, and stores that into
// other objects: both objects must be equal, and the second cache must hold exactly the bytes that
// were loaded. That these are the right bytes is tested where an oracle is, in Python.

#include <cstdio>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../../maru_kv_ops/csrc/transfers.h"
#include "replay.h"

namespace {

enum class Operation { kMultiLayer, kSingleLayer, kBlocks };

constexpr int64_t kLayers = 2, kBlocks = 5, kBlockTokens = 3, kHeads = 2;

struct Case {
    const maru::FormatFacts* facts;
    Operation operation;
    int64_t head_bytes; // of K alone where K and V are fused
    int64_t shift;      // bytes before everything
    int64_t padding;    // bytes behind every block
    replay::Way way;
    int max_blocks;

    int64_t heads() const {
        const bool one = facts->run == maru::Run::kBlockedScale ||
                         facts->format == maru::EngineKVFormat::NL_X_NB_BS_HS ||
                         facts->format == maru::EngineKVFormat::NL_X_NBBS_ONE_HS;
        return one ? 1 : kHeads;
    }
    int64_t run_bytes() const {
        return head_bytes * (facts->run == maru::Run::kFusedHead ? 2 : 1);
    }
    int64_t width() const {
        return heads() * run_bytes();
    }
    int64_t layers_inside() const {
        return facts->entries == maru::Entries::kOneTensor ? kLayers : 1;
    }
    int64_t planes_inside_block() const {
        return facts->planes == maru::PlanePlace::kInsideBlock ? 2 : 1;
    }
    int64_t block_stride() const {
        return kBlockTokens * width() * planes_inside_block() * layers_inside() +
               (facts->blocks_are_tight ? 0 : padding);
    }
};

// Exactly as many bytes as asked for, behind a shift.
struct Buffer {
    Buffer(int64_t bytes, int64_t shift) : size(bytes), memory(new uint8_t[bytes + shift]{}) {
        first = memory.get() + shift;
    }
    int64_t address() const {
        return reinterpret_cast<int64_t>(first);
    }
    int64_t size;
    std::unique_ptr<uint8_t[]> memory;
    uint8_t* first;
};

struct Cache {
    explicit Cache(const Case& of) {
        const int64_t planes_outside = of.facts->planes == maru::PlanePlace::kOutsideBlock ? 2 : 1;
        int64_t count = 1;
        if (of.facts->entries == maru::Entries::kPerLayer)
            count = kLayers;
        if (of.facts->entries == maru::Entries::kPerPlaneAndLayer)
            count = 2 * kLayers;
        for (int64_t i = 0; i < count; ++i) {
            tensors.emplace_back(planes_outside * kBlocks * of.block_stride(), of.shift);
            pointers.push_back(tensors.back().address());
        }
    }
    std::vector<Buffer> tensors;
    std::vector<int64_t> pointers;
};

// One layer's tensor in the format's memory order.
maru::TensorFacts layer_tensor(const Case& of, int64_t address) {
    const int64_t stride = of.block_stride(), width = of.width(), run = of.run_bytes();
    maru::TensorFacts tensor{address, 1, {}, {}};
    const auto axis = [&tensor](int64_t size, int64_t step) {
        tensor.sizes.push_back(size);
        tensor.strides.push_back(step);
    };
    if (of.facts->run == maru::Run::kBlockedScale) {
        axis(kBlocks, stride);
        axis(kBlockTokens * width, 1);
        return tensor;
    }
    if (of.facts->blocks_are_tight) {
        axis(kBlocks * kBlockTokens, width);
        axis(of.heads(), run);
        axis(run, 1);
        return tensor;
    }
    if (of.facts->planes == maru::PlanePlace::kOutsideBlock)
        axis(2, kBlocks * stride);
    axis(kBlocks, stride);
    if (of.facts->planes == maru::PlanePlace::kInsideBlock)
        axis(2, kBlockTokens * width);
    if (of.facts->page == maru::PageOrder::kHeadMajor) {
        axis(of.heads(), kBlockTokens * run);
        axis(kBlockTokens, run);
    } else if (of.facts->format == maru::EngineKVFormat::NL_X_NB_BS_HS) {
        axis(kBlockTokens, width);
    } else {
        axis(kBlockTokens, width);
        axis(of.heads(), run);
    }
    axis(run, 1);
    return tensor;
}

// The ids of a case, in exactly as much memory.
std::vector<int64_t> ids_of(Operation operation) {
    if (operation == Operation::kBlocks)
        return {4, -1, 0, 2};
    return {kBlocks * kBlockTokens - 1, -3, 0, 4, 3, 7};
}

int64_t num_objects(const Case& of) {
    return of.operation == Operation::kBlocks ? 2 : 1;
}

int64_t object_tokens(const Case& of, const std::vector<int64_t>& ids) {
    const auto count = static_cast<int64_t>(ids.size());
    return of.operation == Operation::kBlocks ? count / num_objects(of) * kBlockTokens : count;
}

int64_t object_layers(const Case& of) {
    return of.operation == Operation::kSingleLayer ? 1 : kLayers;
}

maru::TransferPlan plan_of(const Case& of, maru::TransferDirection direction, const Cache& cache,
                           const std::vector<Buffer>& objects, const std::vector<int64_t>& ids) {
    const int64_t tokens = object_tokens(of, ids), width = of.width();
    const int64_t planes = of.facts->kv_size(), layers = object_layers(of);
    const maru::NumberList numbers{ids.data(), static_cast<int64_t>(ids.size())};
    const maru::NumberList pointers{cache.pointers.data(),
                                    static_cast<int64_t>(cache.pointers.size())};
    if (of.operation == Operation::kBlocks) {
        maru::BlockArguments arguments;
        arguments.pointers = pointers;
        for (const Buffer& object : objects)
            arguments.objects.push_back(object.address());
        arguments.blocks = numbers;
        arguments.direction = direction;
        arguments.shape = {planes,     kLayers,        kBlocks, kBlockTokens,
                           of.heads(), of.run_bytes(), 1,       of.block_stride()};
        arguments.chunk_tokens = tokens;
        arguments.format = of.facts->format;
        arguments.skip_prefix_n_blocks = 1;
        return maru::plan_blocks(arguments);
    }
    const int64_t address = objects.front().address();
    if (of.operation == Operation::kMultiLayer) {
        maru::MultiLayerArguments arguments;
        arguments.key_value = {address,
                               1,
                               {planes, layers, tokens, width},
                               {layers * tokens * width, tokens * width, width, 1}};
        arguments.pointers = pointers;
        arguments.slots = numbers;
        arguments.page_buffer_size = kBlocks * kBlockTokens;
        arguments.direction = direction;
        arguments.format = of.facts->format;
        arguments.block_size = kBlockTokens;
        arguments.head_size = of.head_bytes;
        arguments.skip_prefix_n_tokens = 2;
        arguments.block_stride_elems = of.block_stride();
        return maru::plan_multi_layer(arguments);
    }
    maru::SingleLayerArguments arguments;
    if (planes == 2)
        arguments.staging = {address, 1, {tokens, 2, width}, {2 * width, width, 1}};
    else
        arguments.staging = {address, 1, {tokens, width}, {width, 1}};
    arguments.cache.push_back(layer_tensor(of, cache.pointers[0]));
    if (of.facts->planes == maru::PlanePlace::kOwnTensor)
        arguments.cache.push_back(layer_tensor(of, cache.pointers[kLayers]));
    arguments.slots = numbers;
    arguments.direction = direction;
    arguments.format = of.facts->format;
    arguments.order = maru::StagingOrder::kTokenMajor;
    return maru::plan_single_layer(arguments);
}

int64_t nonzero_bytes(const std::vector<Buffer>& buffers) {
    int64_t count = 0;
    for (const Buffer& buffer : buffers)
        count += buffer.size - std::count(buffer.first, buffer.first + buffer.size, uint8_t{0});
    return count;
}

void expect(bool holds, const std::string& what) {
    if (!holds)
        throw std::logic_error(what);
}

std::map<int, int64_t> stores_by_unit;

replay::Record run(const Case& of, maru::TransferDirection direction, const Cache& cache,
                   const std::vector<Buffer>& objects, const std::vector<int64_t>& ids) {
    const maru::TransferPlan plan = plan_of(of, direction, cache, objects, ids);
    replay::Record record = replay::run(plan.copies, of.way, of.max_blocks);
    for (const auto& [unit, stores] : record.stores_by_unit)
        stores_by_unit[unit] += stores;
    return record;
}

std::vector<Buffer> empty_objects(const Case& of, const std::vector<int64_t>& ids) {
    const int64_t bytes =
        of.facts->kv_size() * object_layers(of) * object_tokens(of, ids) * of.width();
    std::vector<Buffer> objects;
    for (int64_t i = 0; i < num_objects(of); ++i)
        objects.emplace_back(bytes, of.shift);
    return objects;
}

void check(const Case& of, std::mt19937& random) {
    const std::vector<int64_t> ids = ids_of(of.operation);
    const Cache source(of), target(of);
    for (const Buffer& tensor : source.tensors) {
        for (int64_t i = 0; i < tensor.size; ++i)
            tensor.first[i] = static_cast<uint8_t>(1 + random() % 255);
    }
    const std::vector<Buffer> stored = empty_objects(of, ids), again = empty_objects(of, ids);
    const int64_t moved_tokens = of.operation == Operation::kBlocks       ? 2 * kBlockTokens
                                 : of.operation == Operation::kMultiLayer ? 4
                                                                          : 5;
    const int64_t moved = moved_tokens * of.width() * of.facts->kv_size() * object_layers(of);

    expect(run(of, maru::TransferDirection::D2H, source, stored, ids).num_written() == moved,
           "a store writes another number of bytes");
    expect(nonzero_bytes(stored) == moved, "objects with another number of bytes");
    run(of, maru::TransferDirection::H2D, target, stored, ids);
    expect(nonzero_bytes(target.tensors) == moved, "a cache with another number of bytes");
    run(of, maru::TransferDirection::D2H, target, again, ids);
    for (size_t i = 0; i < stored.size(); ++i)
        expect(std::equal(stored[i].first, stored[i].first + stored[i].size, again[i].first),
               "a round trip that changes bytes");
}

} // namespace

int main() {
    std::mt19937 random(1);
    int64_t cases = 0;
    for (const maru::FormatFacts& facts : maru::kFormats) {
        for (const Operation operation :
             {Operation::kMultiLayer, Operation::kSingleLayer, Operation::kBlocks}) {
            for (const int64_t head_bytes : {16, 33, 132, 4100}) {
                for (const int64_t shift : {0, 2, 4, 8, 7}) {
                    if (head_bytes > 4096 && shift != 0)
                        continue; // longer than a piece; the units are the others' part
                    for (const replay::Way way : {replay::Way::kKernel, replay::Way::kOwnNumbers,
                                                  replay::Way::kBatch, replay::Way::kRectangles}) {
                        const Case one{&facts, operation, head_bytes,        shift,
                                       shift,  way,       shift == 7 ? 1 : 3};
                        try {
                            check(one, random);
                        } catch (const std::exception& error) {
                            std::printf("%s, operation %d, head of %d, shift %d, way %d: %s\n",
                                        facts.name, static_cast<int>(operation),
                                        static_cast<int>(head_bytes), static_cast<int>(shift),
                                        static_cast<int>(way), error.what());
                            return 1;
                        }
                        ++cases;
                    }
                }
            }
        }
    }
    std::printf("%lld cases; stores by unit:", static_cast<long long>(cases));
    for (const auto& [unit, stores] : stores_by_unit)
        std::printf(" %d:%lld", unit, static_cast<long long>(stores));
    std::printf("\n");
    return 0;
}
