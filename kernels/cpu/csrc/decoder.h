// The layers of a decoder of the Llama family, and its last norm, in one call.
#pragma once

#include "attention.h"
#include "experts.h"
#include "lora.h"
#include "router.h"

namespace vmp {

// A layer whose projections are `Weight`: Linear or BlockLinear.
template <class Weight>
struct DecoderLayer {
    const float* input_norm;  // the weights of a norm; null: there is none
    const float* attention_output_norm;
    const float* mlp_norm;
    const float* mlp_output_norm;
    const float* q_norm;
    const float* k_norm;
    Weight qkv;
    Weight o;
    Weight gate_up;  // panels of W columns of gate beside the same columns of up
    Weight down;
    Heads heads;
    int64_t inner;  // 0: there is no MLP for all tokens, whose weights are `gate_up` and `down`
    int64_t table;  // the index of the table of rotary angles
    const Experts<Weight>* experts;  // null: the layer has none, and no router
    const Router<typename Weight::Value>* router;
};

// The adapters of a layer's projections; null for those that no adapter changes.
template <class T>
struct LayerAdapters {
    const AdapterStack<T>* qkv;
    const AdapterStack<T>* o;
    const AdapterStack<T>* gate_up;
    const AdapterStack<T>* down;
};

template <class Weight>
struct Decoder {
    const DecoderLayer<Weight>* layers;
    int64_t num_layers;
    const float* norm;
    float eps;
    float residual_multiplier;  // of the output of each attention and each MLP
    int64_t rounds_norms;       // whether norms round before their weights multiply
    int64_t norms_all_heads;    // whether the norms of queries and of keys run over all heads of a token
    int64_t is_gelu;            // whether the tanh approximation of GELU activates the gate, instead of SiLU
    int64_t rotates_pairs;      // whether rotary embedding rotates neighbouring elements
};

// Tables of rotary angles [max_position, dim], `stride` elements apart; the first `dim` elements of a head are rotated.
template <class T>
struct RotaryTables {
    const T* first;
    int64_t stride;
    int64_t dim;
};

// Up to this many rows, every thread norms and quantizes all rows itself, which is faster than one more loop.
constexpr int64_t FEW = 2;

// Computes layers `first` up to `end`, and after the last layer the norm into `out`. `x` [num_tokens, hidden] holds the
// embeddings or the output of the layers before, and is overwritten; `positions` [num_tokens]; one cache for each layer
// of the decoder, which is in groups if W divides the size of blocks; `out` has the shape of `x`, and may be `x`.
// `adapters`, for each layer of the decoder, and `slots` [num_tokens] are null if no token has an adapter.
template <class Weight, class T = typename Weight::Value>
void run(const Decoder<Weight>& decoder, int64_t first, int64_t end, const AttentionMetadata& step, T* x,
         const int64_t* positions, const RotaryTables<T>& rotary, void* const* k_caches, void* const* v_caches,
         T* out, int threads, const LayerAdapters<T>* adapters, const int32_t* slots);

}  // namespace vmp
