{{/* Parts of pods that several kinds share. */}}
{{/* Large numbers of a values file are floats, which would be written as 1e+09: users of OpenShift are. */}}
{{- define "pdserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.podSecurity.runAsUser }}
runAsGroup: {{ int64 .Values.podSecurity.runAsGroup }}
fsGroup: {{ int64 .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* capabilities: what a container has beside none, a list. */}}
{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "pdserve.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Files are written to these alone: the root of every container is read-only. */}}
{{- define "pdserve.env" -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/pdserve
- name: PYTHONUNBUFFERED
  value: "1"
{{- end -}}

{{- define "pdserve.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/pdserve
{{- end -}}
{{- define "pdserve.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 4Gi
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.model.cacheSize }}
{{- end -}}

{{- define "pdserve.tlsMounts" -}}
{{- if ne .Values.tls.mode "none" }}
- name: tls
  mountPath: /etc/pdserve/tls
  readOnly: true
{{- end }}
{{- end -}}
{{- define "pdserve.tlsVolumes" -}}
{{- if ne .Values.tls.mode "none" }}
- name: tls
  secret:
    secretName: {{ include "pdserve.secret.tls" . }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- end -}}
{{- define "pdserve.tlsArguments" -}}
{{- if eq .Values.tls.mode "none" }}
- --insecure
{{- else }}
- --tls-ca=/etc/pdserve/tls/ca.crt
- --tls-cert=/etc/pdserve/tls/tls.crt
- --tls-key=/etc/pdserve/tls/tls.key
- --tls-server-name={{ .Values.tls.serverName }}
{{- end }}
{{- end -}}

{{- define "pdserve.logArguments" -}}
- --log-format={{ .Values.logFormat }}
- --log-level={{ .Values.logLevel }}
{{- with .Values.otlpEndpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "router") */}}
{{- define "pdserve.spread" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- with $root.Values.topology.spreadKeys }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $root.Values.topology.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "pdserve.selector" (dict "root" $root "component" $component) | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where pods may go: a map with nodeSelector, tolerations, affinity, priorityClassName, runtimeClassName. */}}
{{- define "pdserve.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" }}
{{- with index $ $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}
