// The paged KV formats of the field, as facts from which addresses are computed.
//
// Names and numbers are those that engines and copy operations of the field share; the Python twin
// is maru_kv_ops/formats.py, and a test holds the two together. Shapes are physical, outermost axis
// first: NB blocks, NL layers, TWO planes (K and V), BS tokens of a block, NH heads, HS head size,
// CS = 2 * HS with K and V of one head side by side.

#pragma once

#include <cstdint>

namespace maru {

enum class TransferDirection : int {
    H2D = 0, // load: object into the engine's pages
    D2H = 1, // store: the engine's pages into the object
};

enum class EngineKVFormat : int {
    NB_NL_TWO_BS_NH_HS = 0,
    NL_X_TWO_NB_BS_NH_HS = 1,
    NL_X_NB_TWO_BS_NH_HS = 2,
    NL_X_NB_BS_HS = 3,
    TWO_X_NL_X_NBBS_NH_HS = 4,
    NL_X_NBBS_ONE_HS = 5,
    NL_X_TWO_NB_NH_BS_HS = 6,
    NL_X_NB_TWO_NH_BS_HS = 7,
    NB_NL_TWO_NH_BS_HS = 8,
    TWO_X_NL_X_NB_BS_NH_HS = 9,
    NL_X_NB_NH_BS_TWO_HS = 10,
    NL_X_NB_BS_NH_TWO_HS = 11,
    NL_X_NB_NH_BS_CS = 12,
    NL_X_NB_BS_NH_CS = 13,
    NL_X_NB_BSV_BSS = 14,
};

inline constexpr int kNumFormats = 15;

// How the tensors of a cache are listed.
enum class Entries {
    kOneTensor,        // all layers in one tensor
    kPerLayer,         // a tensor for each layer
    kPerPlaneAndLayer, // the K tensors of all layers, then their V tensors
};

// Which axis lies outside the other.
enum class PlanePlace {
    kNone,         // one plane: MLA, or K and V fused in the run
    kInsideBlock,  // [.., NB, .., TWO, page]
    kOutsideBlock, // [TWO, NB, page]
    kOwnTensor,    // K and V in tensors of their own
};
enum class PageOrder {
    kTokenMajor, // [BS, NH, run]
    kHeadMajor,  // [NH, BS, run]
};
enum class Run {
    kHead,         // HS elements: one head of K or of V, or an MLA latent
    kFusedHead,    // 2 * HS elements: K and V of one head
    kBlockedScale, // values of all tokens of a page, then 4 bytes of scale for each of them
};

struct FormatFacts {
    EngineKVFormat format;
    const char* name;
    Entries entries;
    PlanePlace planes;
    PageOrder page;
    Run run;
    bool blocks_are_tight; // NB and BS are one axis, so no block is padded

    constexpr int64_t kv_size() const {
        return planes == PlanePlace::kNone ? 1 : 2;
    }
};

inline constexpr int64_t kScaleBytes = 4; // NL_X_NB_BSV_BSS: one float32 for each token

inline constexpr FormatFacts kFormats[kNumFormats] = {
    {EngineKVFormat::NB_NL_TWO_BS_NH_HS, "NB_NL_TWO_BS_NH_HS", Entries::kOneTensor,
     PlanePlace::kInsideBlock, PageOrder::kTokenMajor, Run::kHead, false},
    {EngineKVFormat::NL_X_TWO_NB_BS_NH_HS, "NL_X_TWO_NB_BS_NH_HS", Entries::kPerLayer,
     PlanePlace::kOutsideBlock, PageOrder::kTokenMajor, Run::kHead, false},
    {EngineKVFormat::NL_X_NB_TWO_BS_NH_HS, "NL_X_NB_TWO_BS_NH_HS", Entries::kPerLayer,
     PlanePlace::kInsideBlock, PageOrder::kTokenMajor, Run::kHead, false},
    {EngineKVFormat::NL_X_NB_BS_HS, "NL_X_NB_BS_HS", Entries::kPerLayer, PlanePlace::kNone,
     PageOrder::kTokenMajor, Run::kHead, false},
    {EngineKVFormat::TWO_X_NL_X_NBBS_NH_HS, "TWO_X_NL_X_NBBS_NH_HS", Entries::kPerPlaneAndLayer,
     PlanePlace::kOwnTensor, PageOrder::kTokenMajor, Run::kHead, true},
    {EngineKVFormat::NL_X_NBBS_ONE_HS, "NL_X_NBBS_ONE_HS", Entries::kPerLayer, PlanePlace::kNone,
     PageOrder::kTokenMajor, Run::kHead, true},
    {EngineKVFormat::NL_X_TWO_NB_NH_BS_HS, "NL_X_TWO_NB_NH_BS_HS", Entries::kPerLayer,
     PlanePlace::kOutsideBlock, PageOrder::kHeadMajor, Run::kHead, false},
    {EngineKVFormat::NL_X_NB_TWO_NH_BS_HS, "NL_X_NB_TWO_NH_BS_HS", Entries::kPerLayer,
     PlanePlace::kInsideBlock, PageOrder::kHeadMajor, Run::kHead, false},
    {EngineKVFormat::NB_NL_TWO_NH_BS_HS, "NB_NL_TWO_NH_BS_HS", Entries::kOneTensor,
     PlanePlace::kInsideBlock, PageOrder::kHeadMajor, Run::kHead, false},
    {EngineKVFormat::TWO_X_NL_X_NB_BS_NH_HS, "TWO_X_NL_X_NB_BS_NH_HS", Entries::kPerPlaneAndLayer,
     PlanePlace::kOwnTensor, PageOrder::kTokenMajor, Run::kHead, false},
    {EngineKVFormat::NL_X_NB_NH_BS_TWO_HS, "NL_X_NB_NH_BS_TWO_HS", Entries::kPerLayer,
     PlanePlace::kNone, PageOrder::kHeadMajor, Run::kFusedHead, false},
    {EngineKVFormat::NL_X_NB_BS_NH_TWO_HS, "NL_X_NB_BS_NH_TWO_HS", Entries::kPerLayer,
     PlanePlace::kNone, PageOrder::kTokenMajor, Run::kFusedHead, false},
    {EngineKVFormat::NL_X_NB_NH_BS_CS, "NL_X_NB_NH_BS_CS", Entries::kPerLayer, PlanePlace::kNone,
     PageOrder::kHeadMajor, Run::kFusedHead, false},
    {EngineKVFormat::NL_X_NB_BS_NH_CS, "NL_X_NB_BS_NH_CS", Entries::kPerLayer, PlanePlace::kNone,
     PageOrder::kTokenMajor, Run::kFusedHead, false},
    {EngineKVFormat::NL_X_NB_BSV_BSS, "NL_X_NB_BSV_BSS", Entries::kPerLayer, PlanePlace::kNone,
     PageOrder::kTokenMajor, Run::kBlockedScale, false},
};

constexpr bool rows_stand_at_their_numbers() {
    for (int i = 0; i < kNumFormats; ++i) {
        if (static_cast<int>(kFormats[i].format) != i)
            return false;
    }
    return true;
}
static_assert(rows_stand_at_their_numbers());

// Sizes of a paged cache as the block operation takes them, under the field's names.
struct PageBufferShapeDesc {
    int64_t kv_size = 0;            // planes: 2, or 1 for MLA and fused formats
    int64_t nl = 0;                 // layers
    int64_t nb = 0;                 // blocks
    int64_t bs = 0;                 // tokens of a block
    int64_t nh = 0;                 // heads
    int64_t hs = 0;                 // elements of one head and token; K and V together where fused
    int64_t element_size = 0;       // bytes
    int64_t block_stride_elems = 0; // elements from one block to the next; 0: no padding
};

} // namespace maru
