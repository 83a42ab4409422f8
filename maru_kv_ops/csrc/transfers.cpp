#include "transfers.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace maru {

namespace {

// ------------------------------------------------------------------------------------ refusals

template <class... Parts> [[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::invalid_argument(text.str());
}

std::string numbers(const std::vector<int64_t>& values) {
    std::ostringstream text;
    text << '[';
    for (size_t i = 0; i < values.size(); ++i)
        text << (i == 0 ? "" : ", ") << values[i];
    text << ']';
    return text.str();
}

std::string describe(const TensorFacts& tensor) {
    std::ostringstream text;
    text << "shape " << numbers(tensor.sizes) << ", strides " << numbers(tensor.strides) << ", "
         << tensor.element_size << " bytes per element";
    return text.str();
}

int64_t times(int64_t left, int64_t right) {
    int64_t product = 0;
    if (__builtin_mul_overflow(left, right, &product))
        refuse("sizes: ", left, " x ", right, " does not fit into 63 bits");
    return product;
}

const FormatFacts& facts_of(EngineKVFormat format) {
    return kFormats[static_cast<int>(format)];
}

void check_pointers(const FormatFacts& facts, const NumberList& pointers, int64_t layers) {
    int64_t expected = layers;
    if (facts.entries == Entries::kOneTensor)
        expected = 1;
    if (facts.entries == Entries::kPerPlaneAndLayer)
        expected = times(2, layers);
    if (pointers.count != expected)
        refuse("cache pointers: ", facts.name, " with ", layers, " layers has ", expected,
               " addresses, found ", pointers.count);
}

// Bytes of one element and strides of all axes must leave every element bytes of its own, and the
// last axis must be contiguous.
void check_rows(const char* what, const TensorFacts& tensor) {
    if (tensor.element_size < 1)
        refuse(what, ": elements of ", tensor.element_size, " bytes");
    const size_t last = tensor.sizes.size() - 1;
    if (tensor.sizes[last] > 1 && tensor.strides[last] != 1)
        refuse(what, ": expected a contiguous last axis, found ", describe(tensor));
    std::vector<std::pair<int64_t, int64_t>> axes; // stride, size
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
        if (tensor.sizes[i] == 0)
            return;
        if (tensor.sizes[i] > 1)
            axes.emplace_back(tensor.strides[i], tensor.sizes[i]);
    }
    std::sort(axes.begin(), axes.end());
    int64_t occupied = 1;
    for (const auto& [stride, size] : axes) {
        if (stride < occupied)
            refuse(what, ": its entries share memory: ", describe(tensor));
        occupied += times(size - 1, stride);
    }
    times(occupied, tensor.element_size);
}

// ------------------------------------------------------------------------------------ geometry

// Where the pages of a cache lie. Strides in bytes.
struct CacheGeometry {
    int64_t pointer_plane_step = 0;
    int64_t pointer_layer_step = 0;
    int64_t plane_stride = 0;
    int64_t layer_stride = 0;
    int64_t block_stride = 0;
    int64_t slots_per_block = 1;
    int64_t num_slots = 0;
    int64_t heads = 1;
    int64_t run_bytes = 0;   // of one head and token; of one token where heads need no split
    int64_t head_stride = 0; // without meaning where heads is 1
    int64_t slot_stride = 0;
};

// A cache as the format says, tight but for the step between blocks (0: tight as well).
CacheGeometry pool_geometry(const FormatFacts& facts, int64_t layers, int64_t num_blocks,
                            int64_t block_tokens, int64_t heads, int64_t run_bytes,
                            int64_t block_stride) {
    CacheGeometry cache;
    cache.heads = heads;
    cache.run_bytes = run_bytes;
    cache.slots_per_block = block_tokens;
    cache.num_slots = times(num_blocks, block_tokens);
    const int64_t page = times(times(block_tokens, heads), run_bytes);
    if (facts.page == PageOrder::kTokenMajor) {
        cache.slot_stride = times(heads, run_bytes);
        cache.head_stride = run_bytes;
    } else {
        cache.slot_stride = run_bytes;
        cache.head_stride = times(block_tokens, run_bytes);
    }
    const int64_t planes_inside = facts.planes == PlanePlace::kInsideBlock ? 2 : 1;
    const int64_t layers_inside = facts.entries == Entries::kOneTensor ? layers : 1;
    const int64_t tight = times(times(layers_inside, planes_inside), page);
    cache.block_stride = block_stride == 0 ? tight : block_stride;
    if (cache.block_stride < tight)
        refuse("block stride: a block of ", facts.name, " has ", tight, " bytes here, found ",
               block_stride, " bytes from one block to the next");
    if (facts.blocks_are_tight && cache.block_stride != tight)
        refuse("block stride: ", facts.name, " has no padding between blocks: expected ", tight,
               " bytes, found ", block_stride);
    if (facts.planes == PlanePlace::kInsideBlock)
        cache.plane_stride = page;
    if (facts.planes == PlanePlace::kOutsideBlock)
        cache.plane_stride = times(num_blocks, cache.block_stride);
    if (facts.planes == PlanePlace::kOwnTensor)
        cache.pointer_plane_step = layers;
    if (facts.entries == Entries::kOneTensor)
        cache.layer_stride = times(planes_inside, page);
    else
        cache.pointer_layer_step = 1;
    times(num_blocks, cache.block_stride);
    return cache;
}

// Where the object's rows lie. Strides in bytes.
struct ObjectGeometry {
    int64_t plane_stride = 0;
    int64_t layer_stride = 0;
    int64_t token_stride = 0;
};

// ------------------------------------------------------------------------------------ copies

// A part of every token's row that lies in one piece in both places, or in one piece per head.
struct RowPart {
    int64_t cache_offset;
    int64_t object_offset;
    int64_t heads;
    int64_t run_bytes;
    int64_t slot_stride;
    int64_t head_stride;
};

std::vector<RowPart> parts_of_a_row(const FormatFacts& facts, const CacheGeometry& cache) {
    if (facts.run != Run::kBlockedScale)
        return {{0, 0, cache.heads, cache.run_bytes, cache.slot_stride, cache.head_stride}};
    const int64_t values = cache.run_bytes - kScaleBytes;
    return {{0, 0, 1, values, values, 0},
            {times(cache.slots_per_block, values), values, 1, kScaleBytes, kScaleBytes, 0}};
}

// Places axes around the items by their strides in the object, and melts the innermost ones into
// the row where both sides are contiguous.
void set_axes(StridedCopy& copy, int64_t item_stride, std::vector<CopyAxis> axes) {
    axes.erase(std::remove_if(axes.begin(), axes.end(),
                              [](const CopyAxis& axis) { return axis.count == 1; }),
               axes.end());
    std::stable_sort(axes.begin(), axes.end(), [](const CopyAxis& left, const CopyAxis& right) {
        return left.object_stride > right.object_stride;
    });
    size_t outer = 0;
    while (outer < axes.size() && axes[outer].object_stride > item_stride)
        ++outer;
    while (axes.size() > outer && axes.back().pointer_step == 0 &&
           axes.back().cache_stride == copy.row_bytes &&
           axes.back().object_stride == copy.row_bytes) {
        copy.row_bytes = times(copy.row_bytes, axes.back().count);
        axes.pop_back();
    }
    copy.num_axes = static_cast<int>(axes.size());
    copy.num_outer_axes = static_cast<int>(outer);
    std::copy(axes.begin(), axes.end(), copy.axes);
}

CopyAxis plane_axis(const FormatFacts& facts, const CacheGeometry& cache,
                    const ObjectGeometry& object) {
    return {facts.kv_size(), cache.plane_stride, object.plane_stride, cache.pointer_plane_step};
}

CopyAxis layer_axis(int64_t layers, const CacheGeometry& cache, const ObjectGeometry& object) {
    return {layers, cache.layer_stride, object.layer_stride, cache.pointer_layer_step};
}

StridedCopy start_copy(TransferDirection direction, const NumberList& pointers,
                       const RowPart& part) {
    StridedCopy copy{};
    copy.direction = direction;
    copy.cache_pointers = pointers.values;
    copy.cache_offset = part.cache_offset;
    copy.object_offset = part.object_offset;
    copy.row_bytes = part.run_bytes;
    return copy;
}

// One copy for each part of a row: tokens of `slots` from `first` on, in one object.
std::vector<StridedCopy> token_copies(const FormatFacts& facts, const CacheGeometry& cache,
                                      const ObjectGeometry& object, int64_t layers,
                                      TransferDirection direction, const NumberList& pointers,
                                      int64_t object_address, const NumberList& slots,
                                      int64_t first) {
    std::vector<StridedCopy> copies;
    for (const RowPart& part : parts_of_a_row(facts, cache)) {
        StridedCopy copy = start_copy(direction, pointers, part);
        copy.ids = slots.values;
        copy.first_item = first;
        copy.num_items = slots.count;
        copy.slots_per_block = cache.slots_per_block;
        copy.block_stride = cache.block_stride;
        copy.slot_stride = part.slot_stride;
        copy.items_per_object = std::max<int64_t>(1, slots.count);
        copy.object_item_stride = object.token_stride;
        copy.objects[0] = object_address;
        set_axes(copy, object.token_stride,
                 {plane_axis(facts, cache, object), layer_axis(layers, cache, object),
                  CopyAxis{part.heads, part.head_stride, part.run_bytes, 0}});
        copies.push_back(copy);
    }
    return copies;
}

} // namespace

// ------------------------------------------------------------------------------------ numbers

EngineKVFormat format_of(int64_t number) {
    if (number < 0 || number >= kNumFormats)
        refuse("engine_kv_format: ", number, " is no known format; they are 0 to ",
               kNumFormats - 1);
    return static_cast<EngineKVFormat>(number);
}

TransferDirection direction_of(int64_t number) {
    if (number != 0 && number != 1)
        refuse("direction: ", number, " is neither H2D (0) nor D2H (1)");
    return static_cast<TransferDirection>(number);
}

void check_ids(const TransferPlan& plan, const NumberList& ids) {
    for (int64_t i = plan.first_id; i < ids.count; ++i) {
        if (ids.values[i] >= plan.num_ids)
            refuse(plan.id_name, " ", ids.values[i], " at position ", i, ": the cache has ",
                   plan.id_name, "s 0 to ", plan.num_ids - 1, "; nothing was moved");
    }
}

// ------------------------------------------------------------------------------------ all layers

TransferPlan plan_multi_layer(const MultiLayerArguments& arguments) {
    const FormatFacts& facts = facts_of(arguments.format);
    const TensorFacts& object = arguments.key_value;
    if (object.rank() != 4 || object.sizes[0] != facts.kv_size())
        refuse("key_value: expected [", facts.kv_size(), ", layers, tokens, width] for ",
               facts.name, ", found ", describe(object));
    check_rows("key_value", object);
    const int64_t layers = object.sizes[1], tokens = object.sizes[2], width = object.sizes[3];
    if (layers < 1 || width < 1)
        refuse("key_value: expected at least one layer and a width, found ", describe(object));
    check_pointers(facts, arguments.pointers, layers);
    if (arguments.slots.count != tokens)
        refuse("slot_mapping: expected a slot for each of ", tokens, " tokens, found ",
               arguments.slots.count);
    const int64_t skip = arguments.skip_prefix_n_tokens;
    if (skip < 0 || skip > tokens)
        refuse("skip_prefix_n_tokens: ", skip, " of ", tokens, " tokens");
    if (arguments.page_buffer_size < 0 || arguments.block_size < 0 || arguments.head_size < 0 ||
        arguments.block_stride_elems < 0)
        refuse("sizes: page_buffer_size ", arguments.page_buffer_size, ", block_size ",
               arguments.block_size, ", head_size ", arguments.head_size, ", block_stride_elems ",
               arguments.block_stride_elems, ": none may be negative");

    int64_t block_tokens = arguments.block_size;
    if (block_tokens == 0) {
        const bool one_row_per_slot =
            facts.blocks_are_tight || arguments.format == EngineKVFormat::NL_X_NB_BS_HS;
        if (!one_row_per_slot || arguments.block_stride_elems != 0)
            refuse("block_size: ", facts.name, " needs the number of tokens of a block",
                   arguments.block_stride_elems == 0 ? "" : " to go with block_stride_elems",
                   ", found 0");
        block_tokens = 1;
    }
    if (arguments.page_buffer_size % block_tokens != 0)
        refuse("page_buffer_size: ", arguments.page_buffer_size, " is no multiple of block_size ",
               block_tokens);

    int64_t heads = 1, run_elements = width;
    if (facts.page == PageOrder::kHeadMajor) {
        run_elements = times(arguments.head_size, facts.run == Run::kFusedHead ? 2 : 1);
        if (run_elements < 1 || width % run_elements != 0)
            refuse("head_size: ", facts.name, " has heads of ", run_elements,
                   " elements, but a token of key_value has ", width,
                   ", which is no multiple of that");
        heads = width / run_elements;
    }
    const int64_t run_bytes = times(run_elements, object.element_size);
    if (facts.run == Run::kBlockedScale && run_bytes <= kScaleBytes)
        refuse("key_value: a token of ", facts.name, " is values and ", kScaleBytes,
               " bytes of scale, found ", run_bytes, " bytes");

    const CacheGeometry cache =
        pool_geometry(facts, layers, arguments.page_buffer_size / block_tokens, block_tokens, heads,
                      run_bytes, times(arguments.block_stride_elems, object.element_size));
    const ObjectGeometry rows{times(object.strides[0], object.element_size),
                              times(object.strides[1], object.element_size),
                              times(object.strides[2], object.element_size)};
    TransferPlan plan;
    plan.num_ids = cache.num_slots;
    plan.first_id = skip;
    plan.id_name = "slot";
    plan.copies = token_copies(facts, cache, rows, layers, arguments.direction, arguments.pointers,
                               object.address, arguments.slots, skip);
    return plan;
}

// ------------------------------------------------------------------------------------ one layer

namespace {

// The axes of one layer's tensor in memory order, a letter each: P plane, B block, N token, H head,
// S slot (block and token in one), O an axis of one entry, C content.
const char* axes_in_memory(const FormatFacts& facts, int64_t rank) {
    if (facts.run == Run::kBlockedScale)
        return rank == 3 ? "BNC" : "BC";
    if (facts.format == EngineKVFormat::NL_X_NBBS_ONE_HS)
        return "SOC";
    if (facts.format == EngineKVFormat::TWO_X_NL_X_NBBS_NH_HS)
        return "SHC";
    const bool heads_outside = facts.page == PageOrder::kHeadMajor;
    switch (facts.planes) {
    case PlanePlace::kInsideBlock:
        return heads_outside ? "BPHNC" : "BPNHC";
    case PlanePlace::kOutsideBlock:
        return heads_outside ? "PBHNC" : "PBNHC";
    default:
        break;
    }
    if (facts.format == EngineKVFormat::NL_X_NB_BS_HS && rank == 3)
        return "BNC";
    return heads_outside ? "BHNC" : "BNHC";
}

// One layer's tensor, its axes named.
struct NamedAxes {
    std::string letters; // of the tensor's axes, in the tensor's order
    const TensorFacts* tensor;

    size_t at(char letter) const {
        return letters.find(letter);
    }
    int64_t size(char letter, int64_t otherwise = 1) const {
        return at(letter) == std::string::npos ? otherwise : tensor->sizes[at(letter)];
    }
    int64_t stride(char letter) const { // bytes
        return at(letter) == std::string::npos
                   ? 0
                   : times(tensor->strides[at(letter)], tensor->element_size);
    }
    // Whether the tensor's axes lie in memory in this order, outermost first.
    bool lies_in_order(const std::string& memory_order) const {
        int64_t occupied = 1;
        for (auto letter = memory_order.rbegin(); letter != memory_order.rend(); ++letter) {
            const int64_t size = tensor->sizes[at(*letter)];
            const int64_t stride = tensor->strides[at(*letter)];
            if (size > 1) {
                if (stride < occupied)
                    return false;
                occupied += times(size - 1, stride);
            }
        }
        return true;
    }
};

// K and V in an axis of their own behind the head (rank 5) are the same bytes as one fused axis.
TensorFacts with_fused_content(const FormatFacts& facts, TensorFacts tensor) {
    if (facts.run == Run::kFusedHead && tensor.rank() == 5 && tensor.sizes[3] == 2 &&
        tensor.strides[3] == tensor.sizes[4]) {
        tensor.sizes = {tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], 2 * tensor.sizes[4]};
        tensor.strides = {tensor.strides[0], tensor.strides[1], tensor.strides[2],
                          tensor.strides[4]};
    }
    return tensor;
}

// Names the axes of a layer's tensor: in memory order as the format has it, or as a view with heads
// and tokens the other way round, which is how engines hand out one order over memory of the other.
// Sizes alone cannot tell these apart, so strides decide, and the width of the staging tensor says
// how many heads there are.
NamedAxes name_axes(const FormatFacts& facts, const TensorFacts& tensor, int64_t width) {
    const std::string memory_order = axes_in_memory(facts, tensor.rank());
    const bool content_is_a_page = memory_order == "BC";
    const bool rank_fits = tensor.rank() == static_cast<int64_t>(memory_order.size());
    const int64_t content = rank_fits ? tensor.sizes.back() : 0;
    if (content > 0 && (content == 1 || tensor.strides.back() == 1) &&
        (content_is_a_page ? content % width == 0 : width % content == 0)) {
        const int64_t heads = content_is_a_page ? 1 : width / content;
        std::string swapped = memory_order;
        if (swapped.find('H') != std::string::npos && swapped.find('N') != std::string::npos)
            std::swap(swapped[swapped.find('H')], swapped[swapped.find('N')]);
        for (const std::string& letters : {memory_order, swapped}) {
            const NamedAxes axes{letters, &tensor};
            if (axes.size('H') == heads && axes.size('P', 2) == 2 && axes.size('O') == 1 &&
                axes.lies_in_order(memory_order))
                return axes;
        }
    }
    refuse("vllm_key_value_cache: expected the tensor of one layer in ", facts.name,
           " (memory order ", memory_order, ": P plane, B block, S slot, N token, H head, C ",
           "content) for tokens of ", width, " elements, found ", describe(tensor));
}

CacheGeometry layer_geometry(const FormatFacts& facts, const TensorFacts& tensor, int64_t width) {
    const NamedAxes axes = name_axes(facts, tensor, width);
    CacheGeometry cache;
    cache.heads = axes.size('H');
    cache.run_bytes = times(width / cache.heads, tensor.element_size);
    cache.head_stride = axes.stride('H');
    cache.plane_stride = axes.stride('P');
    if (axes.at('S') != std::string::npos) {
        cache.num_slots = axes.size('S');
        cache.block_stride = axes.stride('S');
        return cache;
    }
    cache.slots_per_block = axes.letters == "BC" ? axes.size('C') / width : axes.size('N');
    cache.num_slots = times(axes.size('B'), cache.slots_per_block);
    cache.block_stride = axes.stride('B');
    cache.slot_stride = axes.stride('N');
    if (facts.run == Run::kBlockedScale) {
        if (cache.run_bytes <= kScaleBytes || cache.slots_per_block < 1)
            refuse("vllm_key_value_cache: a token of ", facts.name, " is values and ", kScaleBytes,
                   " bytes of scale, found ", cache.run_bytes, " bytes in ", describe(tensor));
        if (cache.slots_per_block > 1 && cache.slot_stride != 0 &&
            cache.slot_stride != cache.run_bytes)
            refuse("vllm_key_value_cache: expected contiguous pages for ", facts.name, ", found ",
                   describe(tensor));
    }
    return cache;
}

} // namespace

TransferPlan plan_single_layer(const SingleLayerArguments& arguments) {
    const FormatFacts& facts = facts_of(arguments.format);
    const TensorFacts& staging = arguments.staging;
    const bool two_planes = facts.kv_size() == 2;
    const bool tokens_outside = arguments.order == StagingOrder::kTokenMajor;
    const size_t plane_at = tokens_outside ? 1 : 0;
    if (staging.rank() != (two_planes ? 3 : 2) || (two_planes && staging.sizes[plane_at] != 2))
        refuse("lmc_key_value_cache: expected ",
               !two_planes      ? "[tokens, width]"
               : tokens_outside ? "[tokens, 2, width]"
                                : "[2, tokens, width]",
               " for ", facts.name, ", found ", describe(staging));
    check_rows("lmc_key_value_cache", staging);
    const size_t token_at = two_planes && !tokens_outside ? 1 : 0;
    const int64_t tokens = staging.sizes[token_at], width = staging.sizes.back();
    if (width < 1)
        refuse("lmc_key_value_cache: expected a width, found ", describe(staging));
    if (arguments.slots.count != tokens)
        refuse("slot_mapping: expected a slot for each of ", tokens, " tokens, found ",
               arguments.slots.count);
    const size_t tensors = facts.planes == PlanePlace::kOwnTensor ? 2 : 1;
    if (arguments.cache.size() != tensors)
        refuse("vllm_key_value_cache: ", facts.name, " has ", tensors, " tensors per layer, found ",
               arguments.cache.size());

    std::vector<TensorFacts> cache_tensors;
    for (const TensorFacts& tensor : arguments.cache) {
        if (tensor.element_size != staging.element_size)
            refuse("vllm_key_value_cache: expected elements of ", staging.element_size,
                   " bytes as in lmc_key_value_cache, found ", describe(tensor));
        cache_tensors.push_back(with_fused_content(facts, tensor));
    }
    CacheGeometry cache = layer_geometry(facts, cache_tensors[0], width);
    if (tensors == 2) {
        const CacheGeometry values = layer_geometry(facts, cache_tensors[1], width);
        if (values.block_stride != cache.block_stride || values.slot_stride != cache.slot_stride ||
            values.head_stride != cache.head_stride || values.num_slots != cache.num_slots ||
            values.slots_per_block != cache.slots_per_block)
            refuse("vllm_key_value_cache: K and V must lie alike, found ",
                   describe(cache_tensors[0]), " and ", describe(cache_tensors[1]));
        cache.pointer_plane_step = 1;
    }
    const ObjectGeometry rows{two_planes ? times(staging.strides[plane_at], staging.element_size)
                                         : 0,
                              0, times(staging.strides[token_at], staging.element_size)};
    TransferPlan plan;
    plan.num_ids = cache.num_slots;
    plan.id_name = "slot";
    plan.copies = token_copies(facts, cache, rows, 1, arguments.direction, NumberList{},
                               staging.address, arguments.slots, 0);
    for (StridedCopy& copy : plan.copies) {
        for (size_t i = 0; i < tensors; ++i)
            copy.own_pointers[i] = cache_tensors[i].address;
    }
    return plan;
}

// ------------------------------------------------------------------------------------ blocks

TransferPlan plan_blocks(const BlockArguments& arguments) {
    const FormatFacts& facts = facts_of(arguments.format);
    const PageBufferShapeDesc& shape = arguments.shape;
    if (shape.kv_size != facts.kv_size())
        refuse("shape_desc: kv_size of ", facts.name, " is ", facts.kv_size(), ", found ",
               shape.kv_size);
    if (shape.nl < 1 || shape.nb < 1 || shape.bs < 1 || shape.nh < 1 || shape.hs < 1 ||
        shape.element_size < 1 || shape.block_stride_elems < 0)
        refuse("shape_desc: sizes must be 1 or more, found nl ", shape.nl, ", nb ", shape.nb,
               ", bs ", shape.bs, ", nh ", shape.nh, ", hs ", shape.hs, ", element_size ",
               shape.element_size, ", block_stride_elems ", shape.block_stride_elems);
    check_pointers(facts, arguments.pointers, shape.nl);
    const int64_t num_objects = static_cast<int64_t>(arguments.objects.size());
    if (num_objects < 1 || arguments.blocks.count % num_objects != 0)
        refuse("block_ids: ", arguments.blocks.count, " ids cannot be divided among ", num_objects,
               " objects");
    const int64_t per_object = arguments.blocks.count / num_objects;
    if (arguments.blocks.count > 0 && times(per_object, shape.bs) != arguments.chunk_tokens)
        refuse("chunk_tokens: ", per_object, " blocks of ", shape.bs,
               " tokens per object, but objects of ", arguments.chunk_tokens, " tokens");
    const int64_t skip = arguments.skip_prefix_n_blocks;
    if (skip < 0 || skip > arguments.blocks.count)
        refuse("skip_prefix_n_blocks: ", skip, " of ", arguments.blocks.count, " blocks");
    if (std::find(arguments.objects.begin(), arguments.objects.end(), 0) != arguments.objects.end())
        refuse("object_ptrs: a null address");

    const bool split_heads = facts.page == PageOrder::kHeadMajor;
    const int64_t width = times(times(shape.nh, shape.hs), shape.element_size);
    const int64_t heads = split_heads ? shape.nh : 1;
    if (facts.run == Run::kBlockedScale && (shape.nh != 1 || width <= kScaleBytes))
        refuse("shape_desc: a token of ", facts.name, " is one head of values and ", kScaleBytes,
               " bytes of scale, found nh ", shape.nh, " of ", width, " bytes");
    const CacheGeometry cache =
        pool_geometry(facts, shape.nl, shape.nb, shape.bs, heads, width / heads,
                      times(shape.block_stride_elems, shape.element_size));
    const int64_t layer_stride = times(arguments.chunk_tokens, width);
    const ObjectGeometry rows{times(shape.nl, layer_stride), layer_stride, width};
    const int64_t block_stride_in_object = times(shape.bs, width);

    TransferPlan plan;
    plan.num_ids = shape.nb;
    plan.first_id = skip;
    plan.id_name = "block";
    if (arguments.blocks.count == 0)
        return plan;
    for (int64_t first_object = 0; first_object < num_objects; first_object += kMaxObjects) {
        const int64_t objects = std::min<int64_t>(kMaxObjects, num_objects - first_object);
        const int64_t first_block = first_object * per_object;
        for (const RowPart& part : parts_of_a_row(facts, cache)) {
            StridedCopy copy = start_copy(arguments.direction, arguments.pointers, part);
            copy.ids = arguments.blocks.values + first_block;
            copy.num_items = objects * per_object;
            copy.first_item = std::clamp<int64_t>(skip - first_block, 0, copy.num_items);
            copy.slots_per_block = 1;
            copy.block_stride = cache.block_stride;
            copy.items_per_object = per_object;
            copy.object_item_stride = block_stride_in_object;
            std::copy_n(arguments.objects.begin() + first_object, objects, copy.objects);
            set_axes(copy, block_stride_in_object,
                     {plane_axis(facts, cache, rows), layer_axis(shape.nl, cache, rows),
                      CopyAxis{shape.bs, part.slot_stride, width, 0},
                      CopyAxis{part.heads, part.head_stride, part.run_bytes, 0}});
            plan.copies.push_back(copy);
        }
    }
    return plan;
}

} // namespace maru
