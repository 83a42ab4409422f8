// From the arguments of the three copy operations to strided copies.
//
// Pure arithmetic over addresses, sizes and strides; nothing here reads memory that a device owns.
// Every refusal is a std::invalid_argument with what was expected and what was found, thrown before
// anything moves. Callers: the host binding and the CUDA binding.
//
// Object layouts
//   token range, all layers   [kv_size, layers, tokens, width], contiguous rows
//   token range, one layer    [kv_size, tokens, width] or [tokens, kv_size, width]; [tokens, width]
//   blocks                    objects of [kv_size, layers, chunk_tokens, width]
// where width is heads x head size (x 2 where K and V are fused; the latent for MLA; values and
// scale for NL_X_NB_BSV_BSS). slot = block * block_size + offset.

#pragma once

#include <cstdint>
#include <vector>

#include "formats.h"
#include "strided_copy.h"

namespace maru {

// A tensor by its address, sizes and strides.
struct TensorFacts {
    int64_t address = 0;
    int64_t element_size = 0;     // bytes
    std::vector<int64_t> sizes;   // elements
    std::vector<int64_t> strides; // elements

    int64_t rank() const {
        return static_cast<int64_t>(sizes.size());
    }
};

// A list of int64 numbers where the copy will run.
struct NumberList {
    const int64_t* values = nullptr;
    int64_t count = 0;
};

// What every copy of one call has in common, for checks of ids that can read them.
struct TransferPlan {
    std::vector<StridedCopy> copies;
    int64_t num_ids = 0;      // slots or blocks that the cache has: ids must be less
    int64_t first_id = 0;     // ids before it are not used
    const char* id_name = ""; // "slot" or "block"
};

// Refuses ids that the cache does not have. `ids` are those of the call, readable here.
void check_ids(const TransferPlan& plan, const NumberList& ids);

struct MultiLayerArguments {
    TensorFacts key_value; // [kv_size, layers, tokens, width]
    NumberList pointers;
    NumberList slots;
    int64_t page_buffer_size = 0;
    TransferDirection direction = TransferDirection::H2D;
    EngineKVFormat format = EngineKVFormat::NB_NL_TWO_BS_NH_HS;
    int64_t block_size = 0;
    int64_t head_size = 0;
    int64_t skip_prefix_n_tokens = 0;
    int64_t block_stride_elems = 0;
};
TransferPlan plan_multi_layer(const MultiLayerArguments& arguments);

enum class StagingOrder {
    kPlaneMajor, // [2, tokens, width]
    kTokenMajor, // [tokens, 2, width]
};

struct SingleLayerArguments {
    TensorFacts staging;
    std::vector<TensorFacts> cache; // one tensor; K and V for formats with lists of their own
    NumberList slots;
    TransferDirection direction = TransferDirection::H2D;
    EngineKVFormat format = EngineKVFormat::NL_X_NB_BS_HS;
    StagingOrder order = StagingOrder::kPlaneMajor;
};
TransferPlan plan_single_layer(const SingleLayerArguments& arguments);

struct BlockArguments {
    NumberList pointers;
    std::vector<int64_t> objects;
    NumberList blocks;
    TransferDirection direction = TransferDirection::H2D;
    PageBufferShapeDesc shape;
    int64_t chunk_tokens = 0;
    EngineKVFormat format = EngineKVFormat::NL_X_NB_BS_HS;
    int64_t skip_prefix_n_blocks = 0;
};
TransferPlan plan_blocks(const BlockArguments& arguments);

// Enumerations from their numbers; std::invalid_argument for any other.
EngineKVFormat format_of(int64_t number);
TransferDirection direction_of(int64_t number);

} // namespace maru
