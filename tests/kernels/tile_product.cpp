// A product of tiles, for tests: computed by the processor or, with VMP_TILE_MODEL, by the model of its instructions.

#include <cstdint>
#include <cstdio>
#include <exception>

#if defined(VMP_TILE_MODEL)
#include "tile_model.h"
#else
#include <immintrin.h>
#endif

// Adds the product of `a` and `b` to `sums`, each of up to 16 rows of 64 bytes; `config` gives their sizes as tiles 1, 2
// and 0. Returns the message of a fault of the model, or null.
extern "C" const char* multiply(const void* config, const void* a, const void* b, void* sums, int is_bf16) {
    static char message[200];
    try {
        asm volatile("" : : "r"(config), "r"(a), "r"(b), "r"(sums) : "memory");
        _tile_loadconfig(config);
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, a, 64);
        _tile_loadd(2, b, 64);
        if (is_bf16)
            _tile_dpbf16ps(0, 1, 2);
        else
            _tile_dpbusd(0, 1, 2);
        _tile_stored(0, sums, 64);
        _tile_release();
        return nullptr;
    } catch (const std::exception& fault) {
        std::snprintf(message, sizeof message, "%s", fault.what());
        return message;
    }
}
