// Included in ggml_vk_load_shaders(). Upstream's kernels for VK_NV_cooperative_matrix2 decode only upstream types. Devices with that
// extension also have VK_KHR_cooperative_matrix, so ggml-ext types use the shaders, tiles and limits of the latter.
#if defined(VK_KHR_cooperative_matrix) && defined(GGML_VULKAN_COOPMAT_GLSLC_SUPPORT)
    if (device->coopmat2 && device->coopmat_support) {
        const uint32_t tm = device->coopmat_m, tn = device->coopmat_n, tk = device->coopmat_k, wm = device->subgroup_size == 8 ? 8 : 32;
        const std::vector<vk_tile_config> tc_mmq = {
            {{ subgroup_size_32, 32,  32,  32, wm,            32, 2, tm, tn, tk, subgroup_size_8 }, { 32,  32,  1 }, 32 },
            {{ 128,              64,  64,  32, mm_warp_8,     32, 2, tm, tn, tk, mm_warp_8 },       { 64,  64,  1 }, 64 },
            {{ 128,              128, 128, 32, mm_warp_8 * 2, 64, 2, tm, tn, tk, mm_warp_8 },       { 128, 128, 1 }, 128 },
        };
        const std::vector<vk_tile_config> & tc_mmq_id = tc_mmq;
        const auto cm1_create = [&](const vk_matmul_pipeline_key & key, const std::vector<vk_tile_config> & tiles, const std::string & name, size_t len,
                                    const void * data, uint32_t pc_size, uint32_t pc) {
            std::vector<vk_tile_config> fitting_tiles;
            for (const vk_tile_config & tile : tiles) {
                if (ggml_vk_matmul_shmem_support(device, tile.warptile, key.mul_mat_id, key.type_a)) {
                    fitting_tiles.push_back(tile);
                }
            }
            if (!fitting_tiles.empty()) {
                create_mm_pipelines(key, fitting_tiles, name, len, data, pc_size, pc,
                                    [&](const std::vector<uint32_t> & warptile, bool aligned) { return ggml_vk_mul_mm_spec(warptile, aligned); }, false, true);
            }
        };
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_VK_MM_CM1)
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_VK_MM_ID_CM1)
    }
#endif
